from ckpt.files.atomic import (
    FolderWriter as FolderWriter,
    check_target as check_target,
    remove_abandoned as remove_abandoned,
)
from ckpt.files.block_fp8 import (
    BLOCK as BLOCK,
    SCALE as SCALE,
    in_fp8 as in_fp8,
    is_quantized as is_quantized,
    quantization_config as quantization_config,
    scales_shape as scales_shape,
    stacked_experts as stacked_experts,
)
from ckpt.files.boxio import STAGING_BYTES as STAGING_BYTES
from ckpt.files.contents import ADAPTER as ADAPTER, ADAPTER_WEIGHTS as ADAPTER_WEIGHTS
from ckpt.files.disk import REFUSALS as REFUSALS, replacing as replacing, room_for as room_for
from ckpt.files.dtypes import config_dtype as config_dtype
from ckpt.files.header import Transposed as Transposed, read_header as read_header
from ckpt.files.locks import Lock as Lock, lock_file as lock_file
from ckpt.files.mirror import mirrored as mirrored
from ckpt.files.stores import Store as Store
from ckpt.files.tensor_bytes import same_bytes as same_bytes, sync_and_sum as sync_and_sum
