from ckpt.comparison.compare import verify as verify
from ckpt.comparison.report import Report as Report
from ckpt.files.folder import Checkpoint as Checkpoint
from ckpt.layout.adapters import AdapterLayout as AdapterLayout
from ckpt.layout.families.table import Role as Role
from ckpt.layout.model_layout import Layout as Layout, layout_for as layout_for
from ckpt.layout.pieces import Block as Block, Canonical as Canonical, Piece as Piece
from ckpt.layout.place import Grid as Grid, Place as Place
from ckpt.training.checkpoint import (
    TrainingState as TrainingState,
    load_training as load_training,
    save_training as save_training,
)
from ckpt.training.rng import restore_rng as restore_rng
from ckpt.transfer.adapters import load_adapter as load_adapter, save_adapter as save_adapter
from ckpt.transfer.agreement import agree as agree
from ckpt.transfer.load import load_hf as load_hf
from ckpt.transfer.offline import merge as merge, reshard as reshard
from ckpt.transfer.save import save_hf as save_hf
from ckpt.transfer.stream import stream_hf as stream_hf
from ckpt.transfer.to_megatron import to_megatron as to_megatron
