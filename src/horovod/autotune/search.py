"""Chooses which settings to try next. Pure, and the same from run to run: optuna's sampler has a fixed seed.

The speed of a machine drifts by more than good settings differ, within minutes. So the search measures a *reference*, the first
of the defaults, between any two trials. The score of a trial is its speed divided by the mean of the reference around it.

The search has four kinds of trials, in this order:

1. the settings that the job begins with;
2. points that are known to be good;
3. suggestions of optuna's tree-structured Parzen estimator, until the number of trials is used up, or ``PATIENCE`` trials have
   found nothing better, or everything has been tried;
4. the best few, and the defaults and the first settings if they are near, in turns. The scores of these turns alone decide: an
   earlier score that was high by chance is why some settings get here. If the defaults are as fast as the best, within the
   noise, they are chosen.
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
"""How many of the best settings are measured again, and how often."""
_NEAR = 0.9
"""Settings are measured again down to this share of the best score."""
_ALIKE = 0.98
"""Settings count as equally fast down to this share of the best speed."""
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
        trials: the greatest number of trials before the last turns.
        noise: 0 to 1, how noisy one trial is: the weight of the estimator's prior.
    """

    def __init__(self, space: Space, start: TunedSettings, default: TunedSettings, trials: int, noise: float) -> None:
        self.space = space
        self._start = start
        self._left = trials
        self._points = [space.at(start, point) for point in space.first_points(default)]
        self._defaults = self._points[:OF_DEFAULTS]
        self._reference = self._points[0]
        self._before = 0.0  # the speed of the reference before the present trial; 0: not measured
        self._unscored: tuple[TunedSettings, float] | None = None  # the last trial, whose second reference is missing
        self._speeds: dict[TunedSettings, list[float]] = {}
        self._scores: dict[TunedSettings, list[float]] = {}
        self._last_scores: dict[TunedSettings, list[float]] = {}  # of the last turns
        self._turns: list[TunedSettings] | None = None
        self._study: optuna.Study | None = None
        self._noise = noise
        self._without_gain = 0
        self._asked: TunedSettings | None = None
        self._trial: optuna.Trial | None = None

    @property
    def best(self) -> TunedSettings:
        """The settings with the highest score so far; those of the start before there is one. After the last turns, those of
        the defaults if they are as quick."""
        decided = self._turns is not None and not self._turns and self._unscored is None
        compared = (decided and self._last_scores) or self._scores
        best = max(compared, key=self.score, default=self._start)
        known = [each for each in self._defaults if decided and each in compared]
        alike = [each for each in known if self.score(each) >= _ALIKE * self.score(best)]
        return max(alike, key=self.score, default=best)

    def score(self, settings: TunedSettings) -> float:
        """The speed of some settings as a multiple of the reference's; 0 if they were not measured."""
        return median(self._last_scores.get(settings) or self._scores.get(settings, [0.0]))

    def speed(self, settings: TunedSettings) -> float:
        """The measured speed of some settings; 0 if they were not measured."""
        return median(self._speeds.get(settings, [0.0]))

    @property
    def measured(self) -> int:
        """How many different settings were measured."""
        return len(self._speeds)

    @property
    def gain(self) -> float:
        """How much faster the best settings are than the first, as a share."""
        first = self.score(self._start)
        return self.score(self.best) / first - 1 if first > 0 else 0.0

    def ask(self) -> TunedSettings | None:
        """The settings to measure next; None if the search is over."""
        self._asked = self._reference if self._unscored is not None else self._next()
        return self._asked

    def tell(self, speed: float) -> None:
        """Note the speed that was measured with the settings of the last :meth:`ask`."""
        asked = self._asked
        assert asked is not None, "nothing was asked for"
        self._speeds.setdefault(asked, []).append(speed)
        if asked != self._reference:
            self._unscored = asked, speed
            return
        if asked not in self._scores:
            self._scores[asked] = [1.0]
            self._learn(asked, 1.0)
        if self._unscored is not None:
            settings, measured = self._unscored
            self._unscored = None
            self._scored(settings, measured / ((self._before + speed) / 2 if self._before else speed))
        else:
            self._left -= 1
        self._before = speed

    def _scored(self, settings: TunedSettings, score: float) -> None:
        """A trial has its score."""
        if self._turns is not None:
            self._last_scores.setdefault(settings, []).append(score)
            return
        self._left -= 1
        if self._trial is not None:
            better = score > _BETTER * self.score(self.best)
            self._without_gain = 0 if better else self._without_gain + 1
        self._scores[settings] = [score]
        self._learn(settings, score)

    def _next(self) -> TunedSettings | None:
        self._trial = None
        if self._turns is None:
            if self._left > 0 and not self._speeds:
                return self._start
            while self._left > 0 and self._points:
                point = self._points.pop(0)
                if point not in self._scores:
                    return point
            if self._left > 0 and self._without_gain < PATIENCE:
                suggested = self._suggested()
                if suggested is not None:
                    return suggested
            self._turns = self._last_turns()
        return self._turns.pop(0) if self._turns else None

    def _last_turns(self) -> list[TunedSettings]:
        """The best few and what the choice falls back to, each several times, every second turn in reverse."""
        ranking = sorted(self._scores, key=self.score, reverse=True)
        near = [each for each in ranking if self.score(each) >= _NEAR * self.score(ranking[0])]
        known = [each for each in (*self._defaults, self._start) if each in near]
        others = [each for each in dict.fromkeys([*near[:_FINALISTS], *known]) if each != self._reference]
        if others:
            self._last_scores[self._reference] = [1.0]
        return [each for turn in range(_REPEATS) for each in (reversed(others) if turn % 2 else others)]

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
