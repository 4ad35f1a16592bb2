from ckpt.files.written_files import copy_companions as copy_companions, read_companions as read_companions
from ckpt.transfer.adapters import (
    adapter_config as adapter_config,
    adapter_shapes as adapter_shapes,
    in_peft_names as in_peft_names,
    open_adapter as open_adapter,
    whole_adapters as whole_adapters,
)
from ckpt.transfer.agreement import (
    agree_on_first as agree_on_first,
    all_gather_json as all_gather_json,
    described as described,
    raise_first as raise_first,
    rank_in as rank_in,
)
from ckpt.transfer.float8 import float8_sides as float8_sides
from ckpt.transfer.holdings import Holdings as Holdings
from ckpt.transfer.load import load_blocks as load_blocks
from ckpt.transfer.match import refuse_integers as refuse_integers
from ckpt.transfer.receive import receive_hf as receive_hf
from ckpt.transfer.shard_copies import (
    ShardCopy as ShardCopy,
    TargetShards as TargetShards,
    plan_copies as plan_copies,
    weights_to_send as weights_to_send,
)
from ckpt.transfer.sources import open_source as open_source
from ckpt.transfer.tensor_files import TensorFiles as TensorFiles
from ckpt.transfer.whole_matrices import WholeMatrices as WholeMatrices
