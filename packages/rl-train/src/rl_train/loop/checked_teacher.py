"""`check_teacher`: check the teacher of a run against the policy and the prompts, before anything starts."""

from __future__ import annotations

from contextlib import closing

from ckpt import Checkpoint
from parallel_layers.rotary import require_length
from parallel_models.engine import longest_sequence
from rl_train.data.codec import TextCodec
from rl_train.data.prompts import vocabulary_size
from rl_train.engines.reading_server import ReadingServer
from rl_train.engines.vllm_limits import require_vllm
from rl_train.options.options import TrainOptions


def check_teacher(options: TrainOptions, longest: int) -> None:
    """Refuse a teacher with other tokens than the policy, or that does not read `longest` tokens.

    Folders without a tokenizer are taken as they are.

    Raises:
        ValueError: As above; or the engine is not installed, or the server cannot be reached.
    """
    teacher, size = options.teacher, vocabulary_size(options.model)
    if teacher.has_server:
        with closing(ReadingServer(str(teacher.engine), size, timeout=120.0, patience=0.0)) as server:
            server.check(longest, teacher.top_k if options.objective.divergence is not None else 0)
        return
    if teacher.engine == "vllm":
        require_vllm()
    reference = options.reference or options.model
    require_length(longest, longest_sequence(Checkpoint(reference)))
    check_tokens(TextCodec(options.model), TextCodec(reference))
    if options.objective.divergence is not None and size != (size_of_teacher := vocabulary_size(reference)):
        raise ValueError(
            f"objective.divergence needs vocabularies of one size, and {options.model} has {size} entries, {reference} "
            f"{size_of_teacher}; leave objective.divergence out, or take another teacher"
        )


def check_tokens(policy: TextCodec, teacher: TextCodec) -> None:
    """Raise ValueError if a token of the policy has another id in the teacher's tokenizer."""
    if not policy.available or not teacher.available:
        return
    ids, of_teacher = policy.vocabulary, teacher.vocabulary
    if others := sorted(token for token, number in ids.items() if of_teacher.get(token) != number):
        raise ValueError(
            f"{teacher.file} and {policy.file} differ in {len(others)} tokens, such as {others[0]!r} (ids "
            f"{of_teacher.get(others[0])} and {ids[others[0]]}); take a teacher with the policy's tokenizer"
        )
