from megatron_utils.hybrid.build import build_hybrid as build_hybrid
from megatron_utils.hybrid.description import describe_hybrid as describe_hybrid
