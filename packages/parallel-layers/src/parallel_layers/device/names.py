"""Names of GPUs. This file imports no torch."""

from typing import Final, Literal

# The type of device, as in `torch.device`. The kernels and NCCL are for this type.
GPU: Final = "cuda"
DeviceType = Literal["cuda", "cpu"]
# The environment variable of the devices that a process sees.
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# With this environment variable torch asks NVML for GPUs, and does not initialise them.
ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
