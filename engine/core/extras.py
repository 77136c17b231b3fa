"""The name of the distribution, and how to install its extras."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "trainer-nd"
"""The name for pip; on PyPI, "trainer" is another project's package"""


def install_command(extra: str) -> str:
    """Return the command that installs an extra beside this package.

    Where the distribution is installed, from a wheel or a clone, pip reads the extra's packages
    from it and does not look for the distribution anywhere else. Elsewhere the package runs from
    its sources, which the command installs.
    """
    try:
        version(DISTRIBUTION)
    except PackageNotFoundError:
        return f'pip install -e "{Path(__file__).resolve().parents[2]}[{extra}]"'
    return f'pip install "{DISTRIBUTION}[{extra}]"'
