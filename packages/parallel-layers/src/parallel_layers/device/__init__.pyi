from parallel_layers.device.gpus import Graph as Graph, gpu as gpu, on_gpu as on_gpu
from parallel_layers.device.names import (
    ASKS_NVML as ASKS_NVML,
    GPU as GPU,
    VISIBLE_DEVICES as VISIBLE_DEVICES,
    DeviceType as DeviceType,
)
