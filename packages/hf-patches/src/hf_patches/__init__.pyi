from hf_patches.backbone import decoder_layers as decoder_layers
from hf_patches.call import CallState as CallState, PackedOutput as PackedOutput
from hf_patches.families import supported_model_types as supported_model_types
from hf_patches.families.table import FAMILIES as FAMILIES
from hf_patches.patching import Patch as Patch, patch as patch
from hf_patches.report import Report as Report
from hf_patches.tensor_parallel import TensorParallel as TensorParallel
from hf_patches.vision import VisionHooks as VisionHooks
from parallel_layers.data.prefixes import SharedPrefixes as SharedPrefixes, share_prefixes as share_prefixes
