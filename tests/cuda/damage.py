"""Steps that do something that costs time on a GPU: each counter must see it."""

import torch
import torch.nn.functional as F

from tests.cuda.count import count_graphs, count_step
from trainer.engine.estimate.simulate.torch_internals import replace_attribute
from trainer.kernels.attention import reference


def _step(recipe, change):
    """Count a step in which something happens after each forward pass of a block."""

    def inject(step):
        block = step.parallel_model.model.get_submodule("layers.0")
        block.register_forward_hook(lambda module, given, out: change(out))

    return count_step(recipe, 1, 1000, inject)


def item(recipe):
    """Read a number."""
    return _step(recipe, lambda out: out * out.sum().item())


def nonzero(recipe):
    """Ask for positions that depend on values."""
    return _step(recipe, lambda out: out + out.detach().nonzero().sum())


def copy_to_host(recipe):
    """Copy a tensor to the host and back."""
    return _step(recipe, lambda out: out + out.detach().sum().cpu().cuda())


def kernel(recipe):
    """Launch one more operator."""
    return _step(recipe, lambda out: out.neg())


def mask(recipe):
    """Give attention a dense mask in place of the causal flag."""

    def attend_densely(query, key, value, **options):
        S, L = query.shape[2], key.shape[2]
        dense = torch.ones(S, L, dtype=torch.bool, device=query.device).tril()
        options |= {"attn_mask": dense, "is_causal": False}
        return F.scaled_dot_product_attention(query, key, value, **options)

    class Functions:
        scaled_dot_product_attention = staticmethod(attend_densely)
        pad = staticmethod(F.pad)

    with replace_attribute(reference, "F", Functions):
        return count_step(recipe, 1, 1000)


def graph_break(recipe):
    """Break each block's graph."""
    attend = F.scaled_dot_product_attention

    class Functions:
        pad = staticmethod(F.pad)

        @staticmethod
        def scaled_dot_product_attention(*given, **options):
            torch._dynamo.graph_break()
            return attend(*given, **options)

    with replace_attribute(reference, "F", Functions):
        return count_graphs(recipe, 1, 1000)


DAMAGE = {each.__name__: each for each in (item, nonzero, copy_to_host, kernel, mask, graph_break)}
