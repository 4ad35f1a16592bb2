"""`Loop`: the steps of a run, its files and its training checkpoints; a `Recipe` says what it learns from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rl_models import Batch
from rl_train.loop.folder import ADAPTERS, newest_step
from rl_train.loop.recipe import STOP, NothingToLearnError, Recipe
from rl_train.loop.throughput import Throughput
from rl_train.loop.tracing import traced
from rl_train.options.fields import place_of
from rl_train.options.run_options import RunOptions
from rl_train.report.lines import Metrics
from rl_train.report.loggers import Loggers
from rl_train.report.signs import Signs
from rl_train.report.terminal import counted


@dataclass
class Loop:
    """One run. Without Ray every rank has a `Loop` and takes the same steps.

    `options_as_given` has the names of a hub, for loggers. Without `throughput`, FLOPs are not counted.
    """

    options: RunOptions
    options_as_given: RunOptions
    recipe: Recipe
    throughput: Throughput | None = None

    def run(self) -> dict[str, float]:
        """Run all steps that are left, save the result, and return the last step's metrics.

        With a file `stop` in the folder, the run saves a training checkpoint after the step under way, and ends there.

        Raises:
            ValueError: A number is not finite, the reward failed, or dynamic sampling found nothing to learn from; in
                the last case the earlier steps are saved.
        """
        options, recipe, training = self.options, self.recipe, self.options.out / "training"
        done = saved = self._resume(training)
        metrics = Metrics(options.out, done=done) if recipe.writes else None
        loggers = Loggers(
            options.logger * recipe.writes,
            options.out,
            self.options_as_given.to_json(),
            done,
            recipe.say,
            options.metrics_port * recipe.writes,
        )
        values = {} if metrics is None else metrics.last
        nothing: NothingToLearnError | None = None
        stopped = False
        try:
            if recipe.evaluation_interval and not done:
                values_of_start = recipe.evaluate(0) | recipe.seconds
                if metrics is not None:
                    metrics.write(0, values_of_start)
                loggers.write(0, values_of_start)
            for step in range(done + 1, options.steps + 1):
                recipe.seconds = {}
                try:
                    with traced(options, recipe, step):
                        values = self._step(step)
                except FloatingPointError as error:
                    raise ValueError(f"step {step}: {error}; look at the learning rate and the rewards") from error
                except NothingToLearnError as error:
                    nothing = error
                    break
                done = step
                if (interval := recipe.evaluation_interval) and (step % interval == 0 or step == options.steps):
                    values |= recipe.evaluate(step)
                values |= recipe.seconds
                samples, event = recipe.shown(step)
                if metrics is not None:
                    values |= self._warn(metrics.signs, step, values)
                    event["warnings_shown"] = list(metrics.signs.shown.values())
                    metrics.write(step, values, recipe.samples)
                loggers.write(step, values, samples)
                recipe.tell({"step": step, **event, **values})
                if options.save_every and (step % options.save_every == 0 or step == options.steps):
                    self._save(training, step)
                    saved = step
                if step < options.steps and recipe.once((options.out / STOP).exists):
                    stopped = True
                    break
        finally:
            loggers.close()
        if nothing is not None and done == 0:
            raise nothing
        if options.save_every and saved < done:
            self._save(training, done)
        recipe.tell({"phase": "saving"})
        for name, model in recipe.trained.items():
            model.wait_for_save()
            if stopped:
                continue
            model.save_pretrained(options.out / name)
            if options.lora is not None:
                model.save_adapter(options.out / ADAPTERS[name])
        if nothing is not None:
            saved_in = ", ".join(place_of(options.out / name) for name in recipe.trained)
            raise ValueError(
                f"step {done + 1}: {nothing}; if the task is solved, that is the end: what was learned in "
                f"{counted(done, 'step')} is saved in {saved_in}"
            )
        return values

    def _resume(self, training: Path) -> int:
        """Load the newest checkpoint that all models have; return the number of steps done."""
        recipe = self.recipe
        step = int(recipe.once(lambda: newest_step(training, recipe.trained)))
        if step:
            checkpoints = [model.load_training(training / name, step=step) for name, model in recipe.trained.items()]
            recipe.resume(checkpoints[0].extra, training, step)
            recipe.tell({"message": f"going on after step {step} of {place_of(training)}", "resumed": step})
        return step

    def _save(self, training: Path, step: int) -> None:
        recipe = self.recipe
        recipe.tell({"phase": "saving"})
        # Wait for pending saves before starting a new one: each model prunes its own checkpoints.
        for model in recipe.trained.values():
            model.wait_for_save()
        # With two models keep one more: a kill may come when only one of them has its newest checkpoint.
        keep = self.options.keep + len(recipe.trained) - 1
        extra = recipe.state(training, step)
        for name, model in recipe.trained.items():
            model.save_training(training / name, step=step, keep=keep, extra=extra, asynchronous=True)

    def _warn(self, signs: Signs, step: int, values: dict[str, float]) -> dict[str, float]:
        """Tell of the warnings that begin with a step, and return the number of those that hold."""
        for warning in signs.add(values):
            self.recipe.say(f"step {step}: {warning}")
        return {"warnings": len(signs.shown)}

    def _step(self, step: int) -> dict[str, float]:
        began = time.monotonic()
        if self.throughput is not None:
            self.throughput.begin()
        batch, values = self.recipe.collect(step)
        if batch is not None:
            with self.recipe.phase("learning"):
                values |= self._learn(batch, step)
        self.recipe.hand_over(step)
        seconds = time.monotonic() - began
        values |= {"seconds": seconds, "tokens_per_second": values["tokens"] / seconds}
        if self.throughput is None:
            return values
        return values | self.throughput.describe(values, self.recipe.seconds, self.recipe.drawn_lengths)

    def _learn(self, batch: Batch, step: int) -> dict[str, float]:
        """Learn from a step's batch, and return the means of the metrics of all updates."""
        updates, sums = 0, dict[str, float]()
        for mini_batch in self.recipe.mini_batches(batch, step):
            for name, value in self.recipe.update(mini_batch).items():
                sums[name] = sums.get(name, 0.0) + value
            updates += 1
            self.recipe.tell({"count": "updates", "done": updates, "total": self.options.updates_per_step})
        return {name: total / updates for name, total in sums.items()}
