"""`rl-train plan`: its tables, its JSON and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_train.cli.commands import app
from rl_train.quickstart.task import make_checkpoint


@pytest.mark.slow
def test_the_command_says_what_fits(model: Path) -> None:
    alone = ["plan", "--model", str(model), "--dims", "tp=2", "--tokens", "4096", "--reference"]
    command = [*alone, "--critic"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["models"]) == {"actor", "critic", "reference"}
    largest = max(memory["total"] for stages in found["models"].values() for memory in stages)
    assert largest < found["peak"]
    smaller = json.loads(CliRunner().invoke(app, [*command, "--json", "--offload"]).stdout)
    assert smaller["peak"] == largest
    shared = json.loads(CliRunner().invoke(app, [*alone, "--json", "--share-backbone"]).stdout)
    assert set(shared["models"]) == {"actor_critic", "reference"}
    backbones = [models["models"]["actor_critic" if models is shared else "actor"][0] for models in (shared, found)]
    assert backbones[0]["weights"] - backbones[1]["weights"] == 4 * (128 + 1), "a value head"
    assert shared["peak"] < found["peak"]
    less = json.loads(CliRunner().invoke(app, [*command, "--json", "--recompute=selective"]).stdout)
    assert less["peak"] < found["peak"]
    drawing = CliRunner().invoke(
        app, [*command, "--longest", "4096", "--rollouts.max-sequences", "64", "--rollouts.cache-gib", "0.05"]
    )
    # 4 layers of 2 heads of 16 keys and values in fp32.
    block = 64 * 4 * 2 * 2 * 16 * 4
    cache = int(0.05 * 2**30) // block * block / 2**30
    assert f"actor, stage 0, while it generates: {cache:.2f} GiB of keys and values" in drawing.stdout
    limit = found["peak"] / 2**30 * 0.7
    result = CliRunner().invoke(app, [*command, "--gpu-gib", str(limit)])
    assert "does not fit" in result.stdout
    assert "fits" in result.stdout
    for arguments, message in (
        (["--dims", "tp=3"], "is not divisible by"),
        (["--tokens", "0"], "tokens=0 must be greater than or equal to 1"),
        (["--micro-batches", "0"], "micro_batches=0 must be greater than or equal to 1"),
        (["--recompute", "half"], "recompute='half' must be full, selective, or numbers"),
        (
            ["--share-backbone"],
            "critic (a separate model) and share_backbone (a head on the actor's layers) exclude each other",
        ),
        (["--rollouts.cache-gib", "1"], "--rollouts.cache-gib 1.0 needs --longest"),
        (["--longest", "4096", "--rollouts.cache-gib", "0.0001"], "a sequence of 4096 tokens takes 64 blocks"),
        (["--gpu-gib", "inf"], "gpu_gib=inf must be a finite number"),
        (["--ranks", "8"], "--ranks 8 and --dims tp=2, of 2 ranks, differ; leave one out"),
        (["--engine.pipeline.virtual-stages", "0"], "virtual_stages=0 must be at least 1"),
        (["--engine.pipeline.virtual-stages", "2"], "needs pp > 1"),
        (["--model", str(model / "none")], "config.json"),
        (["--engine.lora.targets", "q_proj"], "engine.lora.targets needs engine.lora.rank; give that, or leave"),
        (
            ["--lora-rank", "8", "--engine.lora.targets", "q_proj,wq"],
            "the target 'wq' of the adapters matches no layer",
        ),
        (["--lora-rank", "8", "--engine.base-format", "fp4"], "engine.base_format='fp4' must be 'fp8'"),
        (["--lora-rank", "8", "--engine.base-format", "fp8", "--engine.float8", "block"], "excludes float8='block'"),
        (["--lora-rank", "8", "--optimizer", "muon"], "leave out lora or algorithm='muon'"),
    ):
        result = CliRunner().invoke(app, [*command, *arguments])
        assert result.exit_code == 2, result.output
        assert message in result.stderr


def test_the_first_table_is_of_the_ranks_that_were_asked_for(model: Path) -> None:
    command = ["plan", "--model", str(model), "--tokens", "4096"]

    def said(*given: str) -> list[str]:
        result = CliRunner().invoke(app, [*command, *given])
        assert result.exit_code == 0, result.output
        return [line.strip() for line in result.stdout.splitlines()]

    assert said()[0] == "GiB on a rank of dp=1, 4096 tokens, all saved"
    for ranks, limit, fits in (("2", "80", True), ("2", "0.001", False)):
        given = ("--ranks", ranks, "--gpu-gib", limit)
        lines, planned = said(*given), json.loads(CliRunner().invoke(app, [*command, *given, "--json"]).stdout)
        first = planned["fitting"][0] if fits else planned
        assert planned["ranks"] == int(ranks)
        assert first["models"] == planned["models"]
        assert lines[0] == f"GiB on a rank of {first['dims']}, 4096 tokens, all saved"
        assert f"{first['dims']} {'fits' if fits else 'does not fit'} {float(limit):.2f} GiB" in lines
    assert said("--dims", "dp=2", "--ranks", "2", "--gpu-gib", "80")[0].startswith("GiB on a rank of dp=2,")


@pytest.mark.parametrize("shared", [pytest.param(value, marks=pytest.mark.slow) for value in (False, True)])
def test_a_terminal_of_80_columns_shows_every_word_and_number_whole(model: Path, shared: bool) -> None:
    # Models of some hundred GiB on a rank.
    command = ["plan", "--model", str(model), "--tokens", "40000000", "--dims", "pp=2,tp=2", "--reference"]
    flags = [
        "--share-backbone" if shared else "--critic",
        "--gpu-gib",
        "900",
        "--mask-width",
        "2",
        "--teacher",
        str(model),
    ]
    result = CliRunner().invoke(app, [*command, *flags], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    planned = json.loads(CliRunner().invoke(app, [*command, *flags, "--json"]).stdout)
    rows = [line.split() for line in result.stdout.splitlines()]
    # Four micro-batches of 4e7 tokens, three copies, 4 bytes for each of two tokens and 8 for their offset.
    assert "stage 1: 7.15 GiB of sampling masks" in result.stdout
    assert "GiB of a teacher's hidden states" in result.stdout
    for name, stages in planned["models"].items():
        for number, memory in enumerate(stages):
            columns = [
                size
                for column, size in memory.items()
                if column not in ("masks", "states", "cache", "generation", "host")
            ]
            assert [name, str(number), *(f"{size / 2**30:.2f}" for size in columns)] in rows
    assert max(memory["total"] for stages in planned["models"].values() for memory in stages) > 100 * 2**30
    assert ["opti-", "gradi-", "gath-", "activa-"] in rows
    assert ["model", "stage", "weights", "mizer", "ents", "ered", "tions", "layer", "logits", "total"] in rows


@pytest.mark.usefixtures("folder_of_rewards")
def test_the_options_that_fit_can_be_given_to_train(prompts: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "letters", seed=0)
    command = ["plan", f"--model={tmp_path / 'letters'}", "--json"]
    savings = ["--recompute", "full", "--tiled-mlp", "8", "--optimizer.offload"]
    least = json.loads(CliRunner().invoke(app, [*command, *savings]).stdout)["peak"]
    result = CliRunner().invoke(app, [*command, "--ranks", "1", "--gpu-gib", str(least / 2**30)])
    (fits,) = json.loads(result.stdout)["fitting"]
    assert fits["savings"] == " ".join(savings)
    given = [f"--model={tmp_path / 'letters'}", f"--prompts={prompts}", "--reward=rewards:alphabet", "--dry-run"]
    pasted = [*fits["savings"].split(), "--dims", fits["dims"]]
    result = CliRunner().invoke(app, ["train", *given, *pasted, "--device=cpu", "--json"])
    assert result.exit_code == 0, result.output
    expected = {"engine.recompute": "full", "engine.tiled_mlp": 8, "optimizer.offload": True}
    assert expected.items() <= json.loads(result.stdout).items()
