"""The differences between the supported versions of Megatron-Core, one row of data for each version.

No other module asks for the version. Support for a version ends by deleting its row, and begins by adding one.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CoreVersion:
    """The differences of one version from the oldest supported version."""

    groups: Mapping[str, str] = field(default_factory=dict)
    """Additional fields of `ProcessGroupCollection`, each with the field whose group it holds."""
    globals: Mapping[str, str] = field(default_factory=dict)
    """Additional globals of `parallel_state`, each with the field of `ProcessGroupCollection` whose group it holds."""
    ranks: Mapping[str, str] = field(default_factory=dict)
    """Additional globals of `parallel_state`, each with the field whose ranks it holds."""
    async_save: Mapping[str, str] = field(default_factory=dict)
    """Additional arguments of `TorchDistSaveShardedStrategy.async_save`."""
    hybrid: bool = False
    """Whether `HybridModel` is there, and its gated delta networks take packed batches."""


# Asynchronous saves by Megatron-Core's own processes; the default needs the package nvidia-resiliency-ext.
_OWN_PROCESSES = {"async_strategy": "mcore"}
# Groups "with GTP": weights gathered again over a further axis, which the grids of this package do not have.
_GTP_GROUPS = {
    "dp_cp_gtp_remat": "dp_cp",
    "expt_dp_gtp_remat": "expt_dp",
    "tp_ep_pp_with_egtp_remat": "tp_ep_pp",
    "gtp_remat": "single",
    "expt_gtp_remat": "single",
}
_GTP_GLOBALS = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp",
    "_GTP_WEIGHT_REMAT_GROUP": "single",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP": "single",
}
_GTP_RANKS = {"_GTP_WEIGHT_REMAT_GLOBAL_RANKS": "single", "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS": "single"}
VERSIONS = {
    "0.16": CoreVersion(),
    "0.17": CoreVersion(async_save=_OWN_PROCESSES),
    "0.18": CoreVersion(async_save=_OWN_PROCESSES, hybrid=True),
    "0.19": CoreVersion(
        groups=_GTP_GROUPS, globals=_GTP_GLOBALS, ranks=_GTP_RANKS, async_save=_OWN_PROCESSES, hybrid=True
    ),
}
"""The row of each supported version, by its first two numbers."""


def core_version(installed: str | None = None) -> CoreVersion:
    """Return the row of a version of Megatron-Core, by default of the installed version.

    Raises:
        ImportError: The version is not supported; names it, the supported versions, and the command that installs one.
    """
    installed = installed or importlib.metadata.version("megatron-core")
    release = re.match(r"\d+\.\d+", installed)
    if release is None or release[0] not in VERSIONS:
        oldest, *_, newest = VERSIONS
        major, minor = newest.split(".")
        raise ImportError(
            f"megatron-core {installed} is installed, and megatron-utils supports {oldest} to {newest}: "
            f'pip install "megatron-core>={oldest},<{major}.{int(minor) + 1}" (0.17 and later need Python 3.12)'
        )
    return VERSIONS[release[0]]


INSTALLED = core_version()
"""The row of the installed version; importing this module without a supported version raises ImportError."""
