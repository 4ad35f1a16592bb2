from parallel_layers.data.micro_batches import (
    pack_micro_batches as pack_micro_batches,
    pad_to as pad_to,
    restore_order as restore_order,
    split_micro_batches as split_micro_batches,
)
from parallel_layers.data.packing import refuse_unshifted_labels as refuse_unshifted_labels
from parallel_layers.data.prefixes import SharedPrefixes as SharedPrefixes, share_prefixes as share_prefixes
