from parallel_layers.distributed.async_collectives import all_gather as all_gather
from parallel_layers.distributed.collectives import (
    all_to_all as all_to_all,
    copy_to_tensor_parallel as copy_to_tensor_parallel,
    gather_from_sequence_parallel as gather_from_sequence_parallel,
    gather_from_tensor_parallel as gather_from_tensor_parallel,
    reduce_from_tensor_parallel as reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel as reduce_scatter_to_sequence_parallel,
    reduce_scatter_to_tensor_parallel as reduce_scatter_to_tensor_parallel,
    scatter_to_sequence_parallel as scatter_to_sequence_parallel,
    scatter_to_tensor_parallel as scatter_to_tensor_parallel,
)
from parallel_layers.distributed.gloo import prepare_gloo as prepare_gloo
from parallel_layers.distributed.parallel_dims import form_group as form_group
