"""A plan that cannot work is refused when the recipe is read, with one that would."""

import pytest

from trainer.engine.parallel.mesh import Degrees
from trainer.engine.recipe.checks.plan_checks import check_plan
from trainer.model_zoo.layout import Layout
from trainer.model_zoo.llama3.config import Llama3Config

RUN = "[run]\nsteps = 1\n"
MODEL = "[model]\nn_layers = 4\nn_heads = 6\nn_kv_heads = 2\ndim = 48\nffn_dim = 96\n"
EXPERTS = (
    '[model]\nname = "qwen3"\nflavor = "moe_debug"\n'
    "moe = { num_experts = 6, expert_ffn_dim = 30 }\n"
)

FAULTS = {
    "heads": (
        "[parallel]\ntensor = 4", 4,
        "parallel.tensor", "4 ranks cannot share model.n_heads = 6 evenly",
        "nearest that works: 2 and 6",
    ),
    "feed-forward": (
        "[model]\nffn_dim = 100\n[parallel]\ntensor = 3", 3,
        "parallel.tensor", "3 ranks cannot share model.ffn_dim = 100 evenly",
        "nearest that works: 2",
    ),
    "key-value heads": (
        "[parallel]\ntensor = 3", 3,
        "parallel.tensor", "3 ranks cannot share model.n_kv_heads = 2 evenly",
        "nearest that works: 2 and 6",
    ),
    "adapters": (
        ('[lora]\nrank = 4\ntargets = ["layers.[023].*"]\n[data]\nmicro_batch = 1\n[parallel]\n'
        "pipeline = 2"), 2,
        "lora.targets",
        "a pipeline needs something to train in each stage: layers.1 has no adapter",
        "let a pattern match weights of every block",
    ),
    "experts": (
        EXPERTS + "[parallel]\nexpert = 4", 4,
        "parallel.expert", "4 ranks cannot share model.moe.num_experts = 6 evenly",
        "nearest that works: 2",
    ),
    "width of experts": (
        EXPERTS + "[parallel]\nexpert_tensor = 4", 4,
        "parallel.expert_tensor", "4 ranks cannot share model.moe.expert_ffn_dim = 30 evenly",
        "nearest that works: 2",
    ),
    "experts on any number of ranks": (
        EXPERTS + "[parallel]\nexpert = 4", None,
        "parallel.expert", "4 ranks cannot share model.moe.num_experts = 6 evenly",
        "nearest that works: 3 and 6",
    ),
    "vocabulary": (
        ("[model]\nn_heads = 16\nn_kv_heads = 16\nhead_dim = 4\nvocab_size = 9\n"
        "[parallel]\ntensor = 8"), 8,
        "parallel.tensor", "8 ranks cannot share model.vocab_size = 9 with a row for each",
        "nearest that works: 2",
    ),
    "vocabulary in uneven shards": (
        "[model]\nvocab_size = 321\n[parallel]\ntensor = 2\nshard = 4", 8,
        "parallel.tensor",
        ("2 tensor ranks, and 4 that shard what each of them has, "
        "cannot share model.vocab_size = 321"),
        "322 would do",
    ),
    "no experts": (
        "[parallel]\nexpert_tensor = 2", 2,
        "parallel.expert_tensor", 'the model "llama3" has no experts that ranks could share',
        "keep 1",
    ),
    "ranks of a stage": (
        EXPERTS + "[parallel]\npipeline = 2\nexpert = 3\nexpert_tensor = 2", 6,
        "parallel.expert",
        "the 3 ranks of a stage are no multiple of expert x expert_tensor (6)",
        "nearest that works: 3",
    ),
    "rules for experts": (
        EXPERTS + "[parallel]\nexpert = 2\n"
        '[[parallel.rules]]\nmatch = ".*experts.down"\nplace = {}', 2,
        "parallel.rules.0.match",
        "layers.0.mlp.experts.down is placed by parallel.expert, not by a rule",
        "match other parameters",
    ),
    "rule that matches nothing": (
        '[[parallel.rules]]\nmatch = "layers.0.mlp.upp.weight"\nplace = {}', 1,
        "parallel.rules.0.match", '"layers.0.mlp.upp.weight" matches no parameter',
        'did you mean "layers.0.mlp.up.weight"?',
    ),
    "rule behind another": (
        ('[[parallel.rules]]\nmatch = ".*up.weight"\nplace = {}\n'
        '[[parallel.rules]]\nmatch = "layers.0.mlp.up.weight"\nplace = {}'), 1,
        "parallel.rules.1.match",
        '"layers.0.mlp.up.weight" matches only parameters that earlier rules took',
        "put it before them",
    ),
    "no expression": (
        '[[parallel.rules]]\nmatch = "*.weight"\nplace = {}', 1,
        "parallel.rules.0.match",
        '"*.weight" is no regular expression: no argument for repetition operator: *', "",
    ),
    "dim that is not there": (
        '[[parallel.rules]]\nmatch = "layers.0.*"\nplace = { tensor = 1 }', 1,
        "parallel.rules.0.place.tensor", "layers.0.attention.norm.weight has no dim 1",
        "its dims: 0",
    ),
    "dim that FSDP cannot cut": (
        ("[parallel]\ntensor = 2\n"
        '[[parallel.rules]]\nmatch = ".*mlp.down.weight"\nplace = { tensor = 1, shard = 1 }'), 64,
        "parallel.rules.0.place.shard",
        "32 ranks cannot share dim 1 of layers.0.mlp.down.weight, 48 wide, evenly",
        "dim 0 works; nearest number of ranks that works: 24",
    ),
    "dim that the tensor axis cannot cut": (
        ("[model]\nn_heads = 5\nn_kv_heads = 5\nhead_dim = 8\nffn_dim = 80\n[parallel]\n"
        "tensor = 5\n"
        '[[parallel.rules]]\nmatch = ".*up.weight"\nplace = { tensor = 1 }'), 5,
        "parallel.rules.0.place.tensor",
        "5 ranks cannot share dim 1 of layers.0.mlp.up.weight, 48 wide, evenly",
        "dim 0 works; nearest number of ranks that works: 4",
    ),
    "overlap without inductor": (
        ('[compile]\nenabled = true\nbackend = "aot_eager"\n'
        "[parallel]\ntensor = 2\nasync_tensor = true"), 2,
        "parallel.async_tensor",
        "inductor overlaps products and collectives, and does not compile this run",
        "set compile.enabled = true, or leave async_tensor out",
    ),
    "shards of what is whole": (
        ('[parallel]\nfsdp = { strategy = "no_shard" }\n'
        '[[parallel.rules]]\nmatch = ".*up.weight"\nplace = { shard = 1 }'), 2,
        "parallel.rules.0.place.shard",
        'parallel.fsdp.strategy = "no_shard" keeps all weights whole',
        'leave shard out, or take "full_shard"',
    ),
    "whole weights off the device": (
        ("[parallel]\nfsdp = { offload = true }\n"
        '[[parallel.rules]]\nmatch = ".*up.weight"\nplace = {}'), 2,
        "parallel.rules.0.place",
        "parallel.fsdp.offload moves pieces, and this weight would be whole",
        "give { shard = 0 }, or do not offload",
    ),
    "sequence": (
        "[data]\nseq_len = 100\n[parallel]\ntensor = 2\ncontext = 2", 4,
        "data.seq_len", "seq_len (100) is no multiple of 8, into which context and tensor cut it",
        "96 or 104 would do",
    ),
    "short sequence": (
        "[data]\nseq_len = 6\n[parallel]\ncontext = 4", 4,
        "data.seq_len", "seq_len (6) is no multiple of 8, into which context cut it", "8 would do",
    ),
    "stages": (
        "[parallel]\npipeline = 8", 8,
        "parallel.pipeline", "8 stages are more than model.n_layers = 4", "at most 4 ranks",
    ),
    "virtual stages": (
        '[parallel]\npipeline = 4\n[parallel.pipelining]\nschedule = "ZBVZeroBubble"', 4,
        "parallel.pipeline", "8 stages are more than model.n_layers = 4", "at most 2 ranks",
    ),
    "one stage a rank": (
        "[parallel]\npipeline = 2\n[parallel.pipelining]\nstages_per_rank = 2", 2,
        "parallel.pipelining.stages_per_rank", '"1F1B" has one stage a rank',
        'leave it out, or take "Interleaved1F1B"',
    ),
    "two stages a rank": (
        ('[parallel]\npipeline = 2\n[parallel.pipelining]\nschedule = "DualPipeV"\n'
        "stages_per_rank = 1"), 2,
        "parallel.pipelining.stages_per_rank", '"DualPipeV" has two stages a rank', "leave it out",
    ),
    "layers": (
        "[parallel]\npipeline = 2\n[parallel.pipelining]\nlayers_per_stage = [1, 2]", 2,
        "parallel.pipelining.layers_per_stage",
        "2 stages of 3 blocks; this plan has 2 stages, the model 4 blocks",
        "leave it out for a balanced cut",
    ),
    "few micro batches": (
        "[data]\nglobal_batch = 8\nmicro_batch = 4\n[parallel]\npipeline = 4", 4,
        "parallel.pipelining.micro_batches",
        '"1F1B" needs 4 micro batches or more, these are 2',
        "lower data.micro_batch, or raise data.global_batch",
    ),
    "uneven micro batches": (
        ("[data]\nglobal_batch = 8\n[parallel]\npipeline = 2\n[parallel.pipelining]\n"
        "micro_batches = 3"), 2,
        "parallel.pipelining.micro_batches", "8 rows a rank do not make 3 micro batches", "",
    ),
    "rounds": (
        ("[data]\nglobal_batch = 7\nmicro_batch = 1\n[parallel]\npipeline = 2\n"
        '[parallel.pipelining]\nschedule = "Interleaved1F1B"'), 2,
        "parallel.pipelining.micro_batches",
        '"Interleaved1F1B" cannot deal 7 micro batches to 2 ranks evenly', "give a multiple of 2",
    ),
}  # fmt: skip


def recipe_of(text):
    """Merge the text's [model] with the tests' model."""
    if "[model]\n" in text:
        given = text.split("[model]\n")[1].split("[")[0].splitlines()
        keys = {line.split(" ")[0] for line in given}
        kept = [line for line in MODEL.splitlines()[1:] if line.split(" ")[0] not in keys]
        return RUN + text.replace("[model]\n", "[model]\n" + "\n".join(kept) + "\n")
    return RUN + MODEL + text


@pytest.mark.parametrize("fault", list(FAULTS))
def test_it_is_refused_with_a_way_out(problems, fault):
    text, world, key, message, hint = FAULTS[fault]
    found = problems(recipe_of(text), world=world)
    assert (key, message, hint) in [(each.key, each.message, each.hint) for each in found]


class Unplanned(Llama3Config):
    layout = Layout(embed="embed", blocks="layers", head="head")


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_a_model_without_a_plan_for_an_axis_is_refused(load, axis):
    recipe = load(RUN).recipe.model_copy(update={"model": Unplanned()})
    ((path, message, hint),) = check_plan(recipe, Degrees(**{axis: 2}, shard=-1))
    assert path == ("parallel", axis)
    assert message == 'the model "llama3" has no plan for this axis'
    assert hint == f"keep parallel.{axis} = 1, and raise parallel.shard"


@pytest.mark.parametrize("family", ["gpt_oss", "llama4", "mistral"])
def test_windows_sinks_and_chunks_go_around_in_a_ring(load, family):
    text = f'[model]\nname = "{family}"\n[parallel]\ncontext = 2\ncontext_exchange = "ring"'
    assert load(RUN + text, world=4).recipe.parallel.context_exchange == "ring"


def test_a_width_that_no_block_has_needs_no_divisor(load, problems):
    sizes = "n_heads = 6\nn_kv_heads = 2\ndim = 48\nffn_dim = 95\n[parallel]\ntensor = 2"
    experts = 'name = "qwen3"\nflavor = "moe_debug"\n'
    assert load(f"{RUN}[model]\n{experts}{sizes}", world=2).recipe.parallel.tensor == 2
    (problem,) = problems(f"{RUN}[model]\n{sizes}", world=2)
    assert problem.message == "2 ranks cannot share model.ffn_dim = 95 evenly"


def test_what_depends_on_an_unknown_number_of_ranks_is_not_checked(load):
    text = MODEL + "[data]\nglobal_batch = 8\n[parallel]\npipeline = -1\nshard = 2"
    assert load(RUN + text).recipe.parallel.pipeline == -1
