"""Pipeline parallelism: Megatron-Core's schedules over packed micro-batches."""

from megatron_utils.pipeline_parallel.schedule import run_schedule

__all__ = ["run_schedule"]
