"""Options from a file and the command line: types, names, what is missing, what may change when a run is resumed."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from parallel_layers import ParallelDims
from rl_models import Actor, MegatronOptions, OptimizerOptions, PipelineOptions, RouterLosses
from rl_models.backends import BackendOptions
from rl_models.losses import BOUNDS, LEVELS
from rl_train.cli.commands import app
from rl_train.loop.objective import ADVANTAGES, LOSSES
from rl_train.loop.run import _models
from rl_train.options.algorithms import ALGORITHMS
from rl_train.options.command import PANELS
from rl_train.options.derived import check, engine_options, optimizer_options
from rl_train.options.draw_options import EvaluateOptions
from rl_train.options.file_options import DistillOptions, DpoOptions, RewardModelOptions
from rl_train.options.groups import ImportanceOptions
from rl_train.options.names import SHORT_NAMES, THEIRS
from rl_train.options.nested import Options, attribute_texts
from rl_train.options.options import TrainOptions
from rl_train.options.resolve import resolve

NEEDED: dict[str, Any] = {"model": Path("m"), "prompts": Path("p"), "reward": "r:f"}
DISTIL: dict[str, Any] = {"algorithm": "on-policy-distillation", "reference": Path("t")}

YAML = """
model: from-file
prompts: p.jsonl
reward: r:f
algorithm: ppo
dims: {tp: 2, pp: 2}
learning-rate: 1e-5
kl_coefficient: 1
stop_ids: [2, 7]
logger: [tensorboard, wandb]
"""
TOML = """
model = "from-file"
prompts = "p.jsonl"
reward = "r:f"
algorithm = "ppo"
dims = "tp=2,pp=2"
learning-rate = 1e-5
kl_coefficient = 1
stop_ids = "2,7"
logger = ["tensorboard", "wandb"]
"""


@pytest.mark.parametrize(("name", "text"), [("run.yaml", YAML), ("run.toml", TOML)])
def test_a_file_holds_the_same_options_and_the_command_line_wins(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    options = resolve(TrainOptions, tmp_path / name, {"model": "from-command-line", "steps": None, "seed": 3})
    assert options == TrainOptions(
        model=Path("from-command-line"),
        prompts=Path("p.jsonl"),
        reward="r:f",
        algorithm="ppo",
        dims="tp=2,pp=2",
        learning_rate=1e-5,
        kl_coefficient=1.0,
        stop_ids="2,7",
        logger="tensorboard,wandb",
        seed=3,
    )
    assert options.grid == ParallelDims(tp=2, pp=2)
    assert options.stops == (2, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rat: 1", "run.yaml: unknown option 'learning_rat'; did you mean 'learning_rate'?"),
        ("lr: 1", "run.yaml: unknown option 'lr'; did you mean 'learning_rate'?"),
        ("steps: many", "run.yaml: steps='many' must be a valid integer"),
        ("steps: 2.5", "run.yaml: steps=2.5 must be a valid integer"),
        ("steps: true", "run.yaml: steps=True must be a valid integer"),
        ("ray: 1", "run.yaml: ray=1 must be a valid boolean"),
        ("model: [a]", "run.yaml: model=['a'] is not a valid path"),
        ("steps: .inf", "run.yaml: steps=inf must be a valid integer"),
        (f"learning_rate: 1{'0' * 400}", "run.yaml: optimizer.learning_rate=1000"),
        ("steps: {2024-01-01: 1}", "run.yaml: steps={datetime.date(2024, 1, 1): 1} must be a valid integer"),
        ("out: 2024-13-45", "run.yaml is not valid YAML: month must be in 1..12"),
        ("max-tokens: 1\nmax_tokens: 1", "run.yaml: 'max-tokens' and 'max_tokens' are the same option; leave one"),
        ("steps: 2\nseed: 1\nsteps: 3", "run.yaml: steps is given more than once; keep one of them"),
        ("- steps", "must hold options by name, got list"),
        ("steps: [", "is not valid YAML"),
        ("steps: 2", "missing: --model, --prompts, --reward"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(TrainOptions, tmp_path / "run.yaml", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "pop"}, "algorithm='pop' must be 'ppo', 'grpo', .* or 'on-policy-distillation'"),
        ({"samples": 1}, "grpo compares the responses to a prompt; samples=1 must be >= 2"),
        ({"steps": 0}, "the command line: steps=0 must be greater than or equal to 1"),
        ({"temperature": 0.0}, "temperature=0.0 must be greater than 0"),
        (
            {"rollouts": "vllm", "top_p": 0.9, "sampling.keep_sampling_mask": True},
            "keep_sampling_mask with rollouts.engine=vllm needs sampling.top_k",
        ),
        ({"steps": 0, "top_p": 2.0}, "sampling: top_p=2.0 must lie in .*; the command line: steps=0 must be"),
        ({"dims": "tq=2"}, "dims='tq=2' is no grid: cannot read 'tq=2'"),
        ({"rollouts.dims": "ep=2"}, "rollouts.dims='ep=2' is no grid: ep=2 does not divide .*; use ep in {1}"),
        ({"stop_ids": "a"}, "stop_ids='a' must be numbers"),
        ({"critic": Path("c")}, "critic.model=c needs an algorithm with a critic"),
        ({"schedule": "wsd"}, "schedule 'wsd' needs decay_steps"),
        ({"schedule": "cosine", "warmup_steps": 100}, "total_steps=100 must be more than warmup_steps=100"),
        ({"dtype": "int8"}, "dtype='int8' must be 'float32', 'bfloat16' or 'float16'"),
        ({"dtype": "float16"}, "dtype=float16 needs backend=megatron; use float32 or bfloat16"),
        ({"collective_timeout": 0}, "collective_timeout=0 must be greater than or equal to 1"),
        ({"collective_timeout": 10**30}, "must be less than or equal to 31536000"),
        ({"rewards.overlong_buffer": 300}, "overlong_buffer=300 is more than max_new_tokens=256"),
        ({"recompute": "half"}, "recompute='half' must be full, selective, or numbers with commas, such as 2,7"),
        ({"recompute": "7-2"}, "recompute='7-2' must be full, selective, or numbers with commas, such as 2,7"),
        ({"engine.context_parallel": "star"}, "context_parallel='star' must be 'ulysses', 'ring' or 'heads'"),
        ({"engine.pipeline.schedule": "2f2b"}, "engine.pipeline.schedule='2f2b' must be '1f1b' or 'zero-bubble'"),
        ({"engine.pipeline.virtual_stages": 0}, "virtual_stages=0 must be at least 1"),
        ({"engine.pipeline.split": "3,0"}, r"split=\[3, 0\] must give every chunk at least one layer"),
        (
            {"critic.dims": "tp=2"},
            "critic.dims=tp=2 needs an algorithm with a critic, such as ppo; give",
        ),
        ({"reference_dims": "tp=1"}, "reference_dims=tp=1 needs a reference beside the policy"),
        (
            {"reference_dims": "tp=2", "kl_coefficient": 0.1},
            "reference_dims=tp=2 has 2 ranks, but the reference shares the policy's ranks, the 1 of",
        ),
        ({"algorithm": "on-policy-distillation"}, "needs the teacher's folder; give reference=FOLDER"),
        (
            {"algorithm": "on-policy-distillation", "reference": Path("t"), "kl_coefficient": 0.1},
            "kl_coefficient=0.1 needs another algorithm than on-policy-distillation",
        ),
        (
            {"algorithm": "on-policy-distillation", "reference": Path("t"), "objective.advantages": "returns"},
            "objective.advantages='returns' must be teacher with",
        ),
        ({"objective.divergence": "reverse_kl"}, "divergence=reverse_kl needs algorithm=on-policy-distillation"),
        (
            DISTIL | {"objective.divergence": "reverse_kl", "backend": "transformers"},
            "divergence=reverse_kl needs backend=parallel, without engine.share_prefixes",
        ),
        ({"teacher.prompts": "hint"}, "teacher.prompts=hint needs algorithm=on-policy-distillation"),
        ({"teacher.engine": "vllm"}, "teacher.engine=vllm needs algorithm=on-policy-distillation"),
        (DISTIL | {"teacher.devices": "4"}, "teacher.devices=4 needs teacher.engine=native or vllm"),
        (DISTIL | {"teacher.engine": "native", "teacher.dims": "tp=2"}, "teacher.dims=tp=2 needs teacher.engine=vllm"),
        (DISTIL | {"teacher.top_k": 9}, "teacher.top_k=9 needs teacher.engine and objective.divergence"),
        (DISTIL | {"teacher.engine": "sglang"}, "teacher.engine='sglang' must be native, vllm or http://HOST:PORT"),
        (DISTIL | {"teacher.engine": "native"}, "teacher.engine=native needs teacher.devices, 1 for each engine"),
        (
            DISTIL | {"teacher.engine": "vllm", "teacher.devices": "4,5,6", "teacher.dims": "tp=2"},
            "teacher.engine=vllm needs teacher.devices, 2 for each engine, and a run without ray; got .*4,5,6",
        ),
        (
            DISTIL | {"teacher.engine": "vllm", "teacher.devices": "4", "temperature": 0.7},
            "reports log-probs at temperature 1, and sampling.temperature=0.7",
        ),
        (
            {
                "algorithm": "on-policy-distillation",
                "teacher.engine": "vllm",
                "teacher.devices": "4",
                "reference": None,
            },
            "needs the teacher's folder; give reference=FOLDER",
        ),
        (DISTIL | {"teacher.engine": "http://a:1"}, "reference=t needs another teacher.engine than a server"),
        (
            {"algorithm": "on-policy-distillation", "teacher.engine": "http://a:1", "top_k": 5}
            | {"sampling.keep_sampling_mask": True},
            "keep_sampling_mask compares log-probs among the kept tokens",
        ),
        (
            {"algorithm": "on-policy-distillation", "teacher.prompts": "hint", "teacher.engine": "vllm"},
            "needs the teacher's folder; give reference=FOLDER, or teacher.prompts=COLUMN alone",
        ),
        (DISTIL | {"objective.mixture": 0.5}, "objective.mixture=0.5 needs objective.divergence"),
        (DISTIL | {"objective.divergence": "jensen_shannon"}, "needs objective.mixture between 0 and 1, got None"),
        (
            DISTIL | {"objective.divergence": "reverse_kl", "objective.mixture": 0.5},
            "divergence=reverse_kl takes no objective.mixture, got 0.5",
        ),
        (
            DISTIL | {"objective.divergence": "reverse_kl", "loss": "gspo"},
            "objective.loss=gspo does not go with objective.divergence",
        ),
        ({"algorithm": "ppo", "critic.dims": "tp=2"}, "critic.dims=tp=2 has 2 ranks, but the critic .* the 1 of"),
        ({"share_backbone": True}, "critic.share_backbone=True needs an algorithm with a critic, such as ppo"),
        (
            {"algorithm": "ppo", "share_backbone": True, "critic": Path("c")},
            "critic.model=c needs a critic without share_backbone; give that, or leave critic.model out",
        ),
        (
            {"algorithm": "ppo", "share_backbone": True, "critic.learning_rate": 1e-4},
            "critic.learning_rate=0.0001 needs a critic without share_backbone",
        ),
        (
            {"algorithm": "ppo", "critic.value_coefficient": 0.1},
            "critic.value_coefficient=0.1 needs critic.share_backbone",
        ),
        ({"objective.kl_estimator": "k4"}, "kl_estimator='k4' must be 'k1', 'k2' or 'k3'"),
        ({"objective.kl_estimator": "k1", "kl_coefficient": 0.1}, "kl_estimator='k1' has no gradient on average"),
        (
            {"objective.aggregation": "mean"},
            "aggregation='mean' must be 'token-mean', 'sequence-mean' or 'sequence-sum'",
        ),
        ({"objective.dual_clip": 0.5}, "dual_clip=0.5 must be greater than 1"),
        ({"algorithm": "sapo", "objective.clip_low": 0.1}, "clip_low=0.1 needs a loss that clips, such as objective.l"),
        ({"objective.dro_beta": 0.5}, "dro_beta=0.5 needs objective.loss=dro; give that"),
        ({"algorithm": "gspo", "objective.dual_clip": 3.0}, "dual_clip=3.0 needs objective.loss=ppo; give that"),
        ({"algorithm": "ppo", "equal_groups": "drop"}, "ppo does not compare .*; leave equal_groups=drop out"),
        ({"objective.importance.veto": 0.1}, "objective.importance.veto=0.1 needs objective.importance.cap"),
        ({"objective.clip_low": -0.1}, "clip_low=-0.1 must be greater than or equal to 0"),
        ({"importance_cap": 0.0}, "importance.cap=0.0 must be greater than 0"),
        (
            {"objective.importance.bound": "mask"},
            "importance.bound=mask needs objective.importance.cap; give that, or leave",
        ),
        (
            {"importance_cap": 2.0, "objective.importance.floor": 0.5},
            "importance.floor=0.5 needs bound=mask and a cap",
        ),
        (
            {"importance_cap": 2.0, "objective.importance.bound": "mask", "objective.importance.floor": 3.0},
            "a cap that is no smaller, not mask and 2.0",
        ),
        ({"objective.importance.level": "word"}, "importance.level='word' must be 'token', 'sequence' or 'geometric'"),
        ({"staleness": -1}, "staleness=-1 must be greater than or equal to 0"),
        ({"learning_rate": -3.0}, "optimizer: learning_rate=-3.0 must be at least 0"),
        ({"learning_rate": float("inf")}, "learning_rate=inf must be a finite number"),
        ({"kl_coefficient": float("nan")}, "kl_coefficient=nan must be a finite number"),
        ({"weight_decay": -1.0}, "optimizer: weight_decay=-1.0 must be at least 0"),
        ({"top_p": 3.0}, r"sampling: top_p=3.0 must lie in \(0, 1\]"),
        ({"top_k": 0}, "sampling: top_k=0 must be at least 1"),
        ({"optimizer.betas": "0.9,1"}, r"optimizer: betas=\(0.9, 1.0\) must be two numbers in \[0, 1\)"),
        ({"rollouts.devices": ""}, "rollouts.devices='' must be ids of devices with commas, such as 4,5, or cpu"),
        (
            DISTIL | {"teacher.engine": "native", "teacher.devices": "4,x"},
            "teacher.devices='4,x' must be ids of devices",
        ),
        ({"agent_command": "'"}, 'agent_command="\'" must be a command, such as .python agent.py. or docker'),
        (
            {"agent_command": "x", "agents.image": "i", "agents.container": " "},
            "agents.container=' ' must be a command",
        ),
        ({"sampling.log_probs": False}, "unknown option 'sampling.log_probs'"),
        ({"algorithm": "ppo", "engine.num_labels": 3}, "engine.num_labels=3 needs rl-train reward --rows labels"),
        ({"critic.learning_rate": 0.5}, "critic.learning_rate=0.5 needs an algorithm with a critic, such as ppo"),
        ({"critic.value_clip": 0.5}, "critic.value_clip=0.5 needs an algorithm with a critic, such as ppo"),
        ({"objective.lam": 0.5}, "objective.lam=0.5 needs objective.advantages=gae, as of algorithm=ppo; give that"),
        ({"objective.gamma": 0.5}, "objective.gamma=0.5 needs objective.advantages=gae or returns"),
        ({"objective.kl_estimator": "k2"}, "objective.kl_estimator=k2 needs a kl_coefficient above 0"),
        ({"eval_every": 5}, "evaluation.every=5 needs evaluation.prompts; give that, or leave evaluation.every out"),
        (
            {"eval_prompts": Path("p"), "evaluation.top_p": 0.9},
            "evaluation.top_p=0.9 needs an evaluation.temperature above 0",
        ),
        ({"save_every": 0, "keep": 3}, "keep=3 needs a save_every above 0; give that, or leave keep out"),
        (
            {"prompts_per_step": 4, "samples": 2, "mini_batch": 9},
            "mini_batch=9 needs as many responses in a step, which has 8, prompts_per_step=4 x samples=2; give that",
        ),
        (
            {"rollouts": "http://a:1", "rollouts.cache_gib": 3.0},
            "rollouts.cache_gib=3.0 needs another rollouts.engine than a server",
        ),
        ({"max_batches": 3}, "max_batches=3 needs equal_groups=resample"),
        ({"rollouts.memory": 0.5}, "rollouts.memory=0.5 needs rollouts.engine=vllm or teacher.engine=vllm"),
        (
            {"data.weights": "2"},
            "data.weights=2 needs several sources, with a weight for each; give that, or leave data",
        ),
        ({"data.weights": "inf"}, "data.weights='inf' must be numbers above 0 with commas"),
        ({"data.weights": "3,"}, "data.weights='3,' must be numbers with commas, such as 0.9,0.95"),
        ({"objective.gamma": 1.5}, "gamma=1.5 must be less than or equal to 1"),
    ],
)
def test_values_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(resolve(TrainOptions, None, NEEDED | options))


def test_the_algorithms_that_can_be_chosen_are_those_of_the_table() -> None:
    assert typing.get_args(TrainOptions.model_fields["algorithm"].annotation) == tuple(ALGORITHMS)
    for row in ALGORITHMS.values():
        assert row.advantages in ADVANTAGES
        assert row.loss in LOSSES


def test_the_importance_weights_that_can_be_chosen_are_those_of_the_tables() -> None:
    for name, table in (("level", LEVELS), ("bound", BOUNDS)):
        assert typing.get_args(ImportanceOptions.model_fields[name].annotation) == tuple(table)


def test_options_that_are_left_out_have_the_values_of_the_algorithm() -> None:
    options = TrainOptions(**NEEDED, algorithm="dapo", samples=None, objective={"clip_low": 0.1})
    objective = options.objective
    assert (options.samples, objective.clip_low, objective.clip_high) == (8, 0.1, 0.28)
    assert (objective.aggregation, objective.kl_estimator) == ("token-mean", "k3")


def test_every_option_of_actors_and_critics_can_be_given(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        """
        model: m
        prompts: p
        reward: r:f
        algorithm: ppo
        kl_coefficient: 0.1
        backend: parallel
        dims: {pp: 2, cp: 2}
        critic: {dims: {tp: 4}}
        dtype: bfloat16
        max_tokens: 512
        recompute: [0, 2]
        engine:
          sequence-parallel: false
          context_parallel: ring
          pipeline: {schedule: zero-bubble, virtual_stages: 2, split: [1, 2, 2, 1]}
          router_losses: {balance: 0.01, sequence_balance: 0.02, z: 1e-3}
          keep_probabilities: false
          mtp_loss_scaling_factor: 0.1
          megatron.layers: transformer_engine
        engine.megatron.distributed_optimizer: false
        optimizer: {algorithm: muon, moments: int8, offload: true, betas: [0.9, 0.95]}
        learning_rate: 1e-5
        """
    )
    made: list[dict[str, Any]] = []
    _models(resolve(TrainOptions, file, {}), lambda kind, path, arguments: made.append(arguments))
    actor, critic, reference = made
    given = set(inspect.signature(Actor.from_pretrained).parameters) - {"path", "device", "mesh", "options"}
    given |= {entry.name for entry in dataclasses.fields(BackendOptions)}
    assert set(actor) == set(critic) == set(reference) == given, "device and mesh follow from where the ranks are"
    expected = {
        "backend": "parallel",
        "dims": ParallelDims(pp=2, cp=2),
        "dtype": torch.bfloat16,
        "sequence_parallel": False,
        "pipeline": PipelineOptions("zero-bubble", 2, (1, 2, 2, 1)),
        "context_parallel": "ring",
        "router_losses": RouterLosses(balance=0.01, sequence_balance=0.02, z=0.001),
        "recompute": (0, 2),
        "keep_probabilities": False,
        "mtp_loss_scaling_factor": 0.1,
        "megatron": MegatronOptions("transformer_engine", distributed_optimizer=False),
        "optimizer": OptimizerOptions(1e-5, (0.9, 0.95), algorithm="muon", moments="int8", offload=True),
        "max_tokens_per_micro_batch": 512,
    }
    assert expected.items() <= actor.items()
    # On a grid of its own a critic has no pipeline.
    assert critic["dims"] == ParallelDims(tp=4)
    assert critic["pipeline"] == PipelineOptions()
    assert critic["sequence_parallel"] is False
    assert critic["mtp_loss_scaling_factor"] == 0
    assert reference["dims"] == actor["dims"]


def test_an_option_has_one_value_by_any_of_its_names() -> None:
    of_engine: list[Any] = [{"tiled_mlp": 4}, BackendOptions(tiled_mlp=4)]
    for given in ({"tiled_mlp": 4}, {"engine.tiled-mlp": 4}, *({"engine": engine} for engine in of_engine)):
        assert TrainOptions(**NEEDED | given).engine.tiled_mlp == 4
    with pytest.raises(ValueError, match=r"'tiled_mlp' and 'engine.tiled_mlp' are the same option; leave one of them"):
        resolve(TrainOptions, None, NEEDED | {"tiled_mlp": 4, "engine": {"tiled_mlp": 2}})
    nearest = {"lora_alpha": "engine.lora.alpha", "engine.tiled_mpl": "engine.tiled_mlp", "lr": "learning_rate"}
    for name, fix in nearest.items():
        with pytest.raises(ValueError, match=f"unknown option '{name}'; did you mean '{fix}'"):
            resolve(TrainOptions, None, NEEDED | {name: 4})
    with pytest.raises(ValueError, match=r"engine.lora.alpha needs engine.lora.rank; give that, or leave"):
        resolve(TrainOptions, None, NEEDED | {"engine.lora.alpha": 4.0})


def test_help_is_the_first_sentence_of_an_attribute() -> None:
    texts = attribute_texts(BackendOptions)
    assert set(texts) == {entry.name for entry in dataclasses.fields(BackendOptions)}
    assert all(text.endswith(".") and "\n" not in text for text in texts.values())


@pytest.mark.parametrize("kind", [TrainOptions, EvaluateOptions, DpoOptions, RewardModelOptions, DistillOptions])
def test_help_names_every_choice(kind: type[Options]) -> None:
    def choices(hint: Any) -> set[Any]:
        members = typing.get_args(hint)
        return set(members) if typing.get_origin(hint) is typing.Literal else set().union(*map(choices, members))

    for option in kind.leaves():
        missing = [name for name in choices(option.field.annotation) if str(name) not in str(option.field.description)]
        assert not [name for name in missing if isinstance(name, str)], option


def test_evaluate_has_no_chat() -> None:
    printed = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "200"}).output
    assert "chat on the terminal" not in printed
    assert "standard output" not in printed.split("--out")[1].split("--", 1)[0]


def test_only_megatron_takes_float16() -> None:
    options = TrainOptions(**NEEDED, dtype="float16", backend="megatron")
    assert engine_options(options, options.grid).dtype is torch.float16


def test_help_has_a_panel_for_each_group_of_options() -> None:
    printed = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    titles = [line.split("─ ")[1].split(" ─")[0] for line in printed.splitlines() if line.startswith("╭")]
    assert titles == ["Options", *dict.fromkeys(PANELS.values())]
    for option in TrainOptions.leaves():
        assert option.name.replace("_", "-") in printed or f"[whole name: {option.name}]" in printed


@pytest.mark.parametrize("command", ["quickstart", "score", "plan", "train"])
def test_help_names_every_option_whole_on_80_columns(command: str) -> None:
    made: Any = typer.main.get_command(app)
    printed = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    assert "…" not in printed
    for parameter in made.commands[command].params:
        assert f" {parameter.opts[0]} " in printed
        assert not parameter.help.startswith("Of "), "a text that says nothing without the option's name"


def test_help_names_the_arguments_first() -> None:
    lines = CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "80"}).output.splitlines()
    assert "evaluate [OPTIONS] MODEL" in " ".join(lines[:3])
    assert "│ MODEL " in next(line for line in lines if line.startswith("│"))


def test_a_plan_refuses_an_unknown_recipe_of_fp8() -> None:
    result = CliRunner().invoke(app, ["plan", "--model", "none", "--engine.float8", "e5m2"])
    assert result.exit_code == 2
    assert "engine.float8='e5m2' must be 'current', 'block' or 'mxfp8'" in result.stderr


def test_schedules_count_steps_of_the_run() -> None:
    options = TrainOptions(
        **NEEDED, steps=10, prompts_per_step=4, samples=2, mini_batch=3, epochs=2, schedule="linear", warmup_steps=2
    )
    assert options.updates_per_step == 6
    schedule = optimizer_options(options, 1.0).schedule
    assert (schedule.warmup_steps, schedule.total_steps) == (12, 60)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"rollouts": "mine:make", "rollouts.devices": "4,5"},
            "rollouts.devices=4,5 needs rollouts.engine=native or vllm",
        ),
        ({"rollouts.devices": "4,5", "offload": True}, "rollouts=native streams the policy's weights"),
        ({"rollouts.dims": "tp=2"}, "rollouts.dims=tp=2 needs rollouts.engine=native or vllm with rollouts.devices"),
        ({"rollouts.devices": "4,5,6", "rollouts.dims": "tp=2"}, "no multiple of the 2 ranks of rollouts.dims=tp=2"),
        (
            {"ray": True, "rollouts.devices": "3", "rollouts.dims": "tp=2"},
            "rollouts.devices=3 are no multiple of the 2 ranks",
        ),
        ({"rollouts.devices": "4,5", "rollouts.dims": "dp=2"}, "rollouts.dims=dp=2 is the grid of one engine"),
        (
            {"rollouts": "vllm", "ray": True, "rollouts.devices": "4,5"},
            "rollouts.devices=4,5 must be the number of the engines'",
        ),
        (
            {"rollouts.quantization": "fp8", "backend": "transformers"},
            "rollouts.quantization=fp8 needs rollouts.engine=vllm, or rollouts.engine=native with backend=parallel",
        ),
        (
            {"rollouts.float8_cache": True, "rollouts": "vllm"},
            "rollouts.float8_cache=True needs rollouts.engine=native",
        ),
        (
            {"rollouts.float8_cache": True, "engine.tp_invariant": True, "rollouts.devices": "4"},
            "rollouts.float8_cache=True needs engine.tp_invariant=False: FP8 rounds otherwise; give that, or leave",
        ),
        ({"rollouts.drafts": 2, "rollouts": "vllm"}, "rollouts.drafts=2 needs rollouts.engine=native with backend="),
        ({"rollouts.experts": "gather"}, "rollouts.experts=gather needs ranks that divide experts, such as dims=dp=2"),
        (
            {"rollouts.experts": "gather", "rollouts.devices": "4"},
            "rollouts.experts=gather needs ranks that divide experts, such as rollouts.dims=tp=2,ep=2; give that",
        ),
        (
            {
                **{"rollouts.devices": "4,5", "rollouts.dims": "tp=2,ep=2", "rollouts.experts": "gather"},
                **{"in_flight": True, "staleness": 1},
            },
            "rollouts.in_flight=True needs rollouts.experts=auto or exchange",
        ),
        ({"rollouts": "vllm", "offload": True}, "rollouts=vllm streams the policy's weights"),
        ({"rollouts": "http://a:1", "ray": True}, "rollouts=http://a:1 is for runs without ray"),
        ({"rollouts": "http://a:1", "rollouts.devices": "4"}, "rollouts.devices=4 needs rollouts.engine=native"),
        ({"rollouts": "vllm", "staleness": 1}, "staleness=1 has vLLM draw while the models learn"),
        ({"in_flight": True, "staleness": 1}, "rollouts.in_flight=True needs rollouts.engine=native or vllm with"),
        ({"in_flight": True, "rollouts.devices": "cpu"}, "needs .* and a staleness of 1 or more; give that, or leave"),
        (
            {"in_flight": True, "rollouts.devices": "4", "staleness": 1, "rollouts": "vllm", "rollouts.adapter": True}
            | {"lora_rank": 8},
            "rollouts.in_flight=True needs all weights to be sent",
        ),
        (
            {"in_flight": True, "rollouts.devices": "4", "staleness": 1, "rollouts.quantization": "fp8"},
            "rollouts.in_flight=True needs weights in engine.dtype",
        ),
        ({"rollouts.partial": 64}, "rollouts.partial=64 needs a staleness of 1 or more"),
        (
            {"rollouts.partial": 64, "in_flight": True, "rollouts.devices": "4", "staleness": 1},
            "rollouts.partial=64 needs synchronous draws, without rollouts.in_flight",
        ),
        (
            {"rollouts.partial": 64, "staleness": 1, "environment": "games:Wordle"},
            "rollouts.partial=64 needs responses of one turn",
        ),
        ({"rollouts.routing": True}, "rollouts.routing=True needs rollouts.engine=vllm; give that"),
        (
            {"rollouts.routing": True, "rollouts": "vllm", "in_flight": True, "rollouts.devices": "4", "staleness": 1},
            "rollouts.routing=True needs draws by one version of the weights",
        ),
        ({"rollouts.stale_cache": "recompute"}, "rollouts.stale_cache=recompute needs rollouts.in_flight"),
    ],
)
def test_options_of_rollouts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(TrainOptions(**NEEDED, **given))
    for devices, ids in (("4,5", ["4", "5"]), ("cpu", [""])):
        assert TrainOptions(**NEEDED, rollouts={"engine": "vllm", "devices": devices}).engine_devices == ids
    assert TrainOptions(**NEEDED, rollouts="vllm").engine_devices is None


@pytest.mark.parametrize(
    ("theirs", "ours"), [("--lr", "--learning-rate"), ("--train-batch-size", "--prompts-per-step")]
)
def test_the_name_of_another_library_leads_to_ours(theirs: str, ours: str) -> None:
    result = CliRunner().invoke(app, ["train", theirs, "3"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"No such option: {theirs} (Possible options: {ours})" in result.output
    names = {option.name for option in TrainOptions.leaves()} | SHORT_NAMES.keys()
    assert names >= {*THEIRS.values()}
    assert not names & THEIRS.keys()
