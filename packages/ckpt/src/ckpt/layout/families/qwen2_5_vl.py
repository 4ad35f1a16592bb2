"""Qwen2.5-VL: to a layout it is Qwen2-VL with another vision tower, which is carried whole in both."""

import dataclasses

from ckpt.layout.families import qwen2_vl
from ckpt.layout.families.towers import QWEN2_5_VL

FAMILY = dataclasses.replace(qwen2_vl.FAMILY, name="qwen2_5_vl", class_prefix="Qwen2_5_VL", tower=QWEN2_5_VL)
