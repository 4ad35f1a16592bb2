"""`Container`: the container of one episode of `--agent-command`, run by docker or podman."""

from __future__ import annotations

import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from rl_train.options.groups import AgentOptions

# Seconds that a program has to remove a container.
_REMOVE_SECONDS = 30.0


class Container(NamedTuple):
    """A container with a name of its own.

    The container shares the network of this machine, as the endpoint listens on its loopback device. It has no mounts,
    and of the environment the base URLs and keys of OpenAI's and Anthropic's clients alone.

    The program is docker or podman, with further options of its command `run`. `memory` is the limit in GiB, swap
    included.
    """

    program: str
    options: Sequence[str]
    image: str
    memory: float | None
    name: str

    @classmethod
    def of(cls, options: AgentOptions) -> Container | None:
        """Return a new container by the options of agents; None without an image.

        Raises:
            ValueError: The program is not installed.
        """
        if options.image is None:
            return None
        program, *more = shlex.split(options.container)
        if shutil.which(program) is None:
            raise ValueError(
                f"agents.image={options.image} needs {program}, which is not on PATH; install it, or give another "
                "agents.container, such as podman"
            )
        return cls(program, more, options.image, options.memory, f"rl-train-{secrets.token_hex(8)}")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs a program in the container, with the standard input of the command."""
        size = [] if self.memory is None else [f"{round(self.memory * 2**20)}k"]
        limits = [flag for text in size for flag in ("--memory", text, "--memory-swap", text)]
        start = [self.program, "run", "--rm", "--interactive", "--name", self.name, "--network", "host"]
        names = (f"{client}_{name}" for client in ("OPENAI", "ANTHROPIC") for name in ("BASE_URL", "API_KEY"))
        keys = [flag for name in names for flag in ("--env", name)]
        return [*start, *keys, *limits, *self.options, self.image, *arguments]

    def remove(self) -> None:
        """End the container, if it has not ended."""
        with suppress(OSError, subprocess.TimeoutExpired):
            command = [self.program, "rm", "--force", self.name]
            subprocess.run(command, capture_output=True, timeout=_REMOVE_SECONDS, check=False)
