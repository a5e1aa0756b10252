"""Chooses which settings to try next. Pure, and the same from run to run: optuna's sampler has a fixed seed.

The search has four kinds of trials, in this order:

1. the settings that the job begins with;
2. points that are known to be good;
3. suggestions of optuna's tree-structured Parzen estimator, until the number of trials is used up, or ``PATIENCE`` trials have
   found nothing better, or everything has been tried;
4. the best few, the better of the defaults, and the first again, in turns, of which one is chosen. So a quiet minute of the
   machine does not decide. If the defaults are as fast as the best, within the noise, they are chosen.
"""

from __future__ import annotations

import importlib.util
import warnings
from statistics import median
from typing import TYPE_CHECKING, Any

from horovod.autotune.space import OF_DEFAULTS, Space, Value
from horovod.comm.tuned import TunedSettings

if TYPE_CHECKING:
    import optuna

PATIENCE = 10
"""The number of optuna's trials without an improvement that ends the search."""
_BETTER = 1.01
"""The ratio to the best speed that counts as an improvement."""
_FINALISTS = 3
_REPEATS = 4
"""How many of the best settings are measured again, beside the first, and how often."""
_ALIKE = 0.98
"""Settings count as equally fast up to this multiple of the best time."""
_SUGGESTIONS = 50
"""How often optuna is asked again for settings that were not tried yet."""
_AT_RANDOM = 6
"""Trials before the estimator has enough to estimate from."""

EXTRA = "autotune"
"""The extra of the package that brings optuna."""


def why_not() -> str:
    """Why this process cannot search; "" if it can."""
    if importlib.util.find_spec("optuna") is not None:
        return ""
    return (
        "it needs the package optuna, which this Python does not have: pip install 'horovod[autotune]' on every host, or "
        "switch autotuning off"
    )


class Search:
    """Trials of one job. Call :meth:`ask`, measure, call :meth:`tell`, and so on until :meth:`ask` returns None.

    Args:
        start: the initial settings of the job, which may be outside the search space.
        default: the settings without autotuning.
        trials: how many trials are made at most before the last turns.
        noise: 0 to 1, how noisy one trial is: the weight of the estimator's prior.
    """

    def __init__(self, space: Space, start: TunedSettings, default: TunedSettings, trials: int, noise: float) -> None:
        self.space = space
        self._start = start
        self._left = trials
        self._scores: dict[TunedSettings, list[float]] = {}
        self._points = [space.at(start, point) for point in space.first_points(default)]
        self._of_defaults = self._points[:OF_DEFAULTS]
        self._study: optuna.Study | None = None
        self._noise = noise
        self._without_gain = 0
        self._turns: list[TunedSettings] | None = None
        self._finalists: list[TunedSettings] = []
        self._asked: TunedSettings | None = None
        self._trial: optuna.Trial | None = None

    @property
    def best(self) -> TunedSettings:
        """The settings with the highest speed so far; those of the start before anything was measured. After the last turns,
        those of the defaults if they are as quick."""
        best = max(self._finalists or self._scores, key=self.score, default=self._start)
        known = [each for each in self._of_defaults if each in self._finalists]
        alike = [each for each in known if self.score(each) >= _ALIKE * self.score(best)]
        return max(alike, key=self.score, default=best)

    def score(self, settings: TunedSettings) -> float:
        """The measured speed of some settings; 0 if they were not measured."""
        return median(self._scores.get(settings, [0.0]))

    @property
    def measured(self) -> int:
        """How many different settings were measured."""
        return len(self._scores)

    @property
    def gain(self) -> float:
        """How much faster the best settings are than the first, as a share."""
        first = self.score(self._start)
        return self.score(self.best) / first - 1 if first > 0 else 0.0

    def ask(self) -> TunedSettings | None:
        """The settings to measure next; None if the search is over."""
        self._asked = self._next()
        return self._asked

    def tell(self, score: float) -> None:
        """Note the speed that was measured with the settings of the last :meth:`ask`."""
        asked, best = self._asked, self.best
        assert asked is not None, "nothing was asked for"
        better = score > _BETTER * self.score(best)
        self._scores.setdefault(asked, []).append(score)
        if self._turns is not None:
            return
        self._left -= 1
        if self._trial is not None:
            self._without_gain = 0 if better else self._without_gain + 1
        self._learn(asked, score)

    def _next(self) -> TunedSettings | None:
        self._trial = None
        if self._turns is None:
            if self._left > 0 and not self._scores:
                return self._start
            while self._left > 0 and self._points:
                point = self._points.pop(0)
                if point not in self._scores:
                    return point
            if self._left > 0 and self._without_gain < PATIENCE:
                suggested = self._suggested()
                if suggested is not None:
                    return suggested
            ranking = sorted(self._scores, key=self.score, reverse=True)
            known = [each for each in ranking if each in self._of_defaults][:1]
            self._finalists = [*dict.fromkeys([*ranking[:_FINALISTS], *known, self._start])] if ranking else []
            self._turns = self._finalists * _REPEATS if len(self._finalists) > 1 else []
        return self._turns.pop(0) if self._turns else None

    def _suggested(self) -> TunedSettings | None:
        """Optuna's suggestion, if it was not tried yet."""
        if len(self._scores) > self.space.size:
            return None
        study = self._made_study()
        for _ in range(_SUGGESTIONS):
            trial = study.ask()
            point = {name: self._value(trial, name, values) for name, values in self.space.choices.items()}
            settings = self.space.at(self._start, point)
            if settings not in self._scores:
                self._trial = trial
                return settings
            study.tell(trial, self.score(settings))
        return None

    def _value(self, trial: optuna.Trial, name: str, values: tuple[Value, ...]) -> Value:
        """A trial's value of one setting. Sizes are suggested by their index, so that neighbouring sizes are similar."""
        if isinstance(values[0], int) and not isinstance(values[0], bool):
            return values[trial.suggest_int(name, 0, len(values) - 1)]
        return values[trial.suggest_categorical(name, list(range(len(values))))]

    def _learn(self, settings: TunedSettings, score: float) -> None:
        """Tell optuna, unless the settings lie outside of what it searches."""
        if self._trial is not None:
            self._made_study().tell(self._trial, score)
            return
        indices: dict[str, Any] = {}
        for name, values in self.space.choices.items():
            value = getattr(settings, name)
            if value not in values:
                return
            indices[name] = values.index(value)
        if indices:
            self._made_study().enqueue_trial(indices)
            trial = self._made_study().ask()
            for name, values in self.space.choices.items():
                self._value(trial, name, values)
            self._made_study().tell(trial, score)

    def _made_study(self) -> optuna.Study:
        if self._study is None:
            import optuna  # here, since it takes a second, and only rank 0 of a job that tunes needs it

            optuna.logging.set_verbosity(optuna.logging.ERROR)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # older versions call multivariate experimental
                sampler = optuna.samplers.TPESampler(
                    seed=0, multivariate=True, n_startup_trials=_AT_RANDOM, prior_weight=max(self._noise, 0.01)
                )
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
        return self._study
