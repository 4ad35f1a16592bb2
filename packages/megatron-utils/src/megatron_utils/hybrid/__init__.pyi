from megatron_utils.hybrid.build import build_hybrid as build_hybrid
