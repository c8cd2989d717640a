"""The ratio: in force, recommended, and what others would do."""

from protocol.messages import AutotuneStatus
from protocol.watching import RatioPicture
from rollout_service.watch.observed import Choices
from rollout_service.watch.predictor import Predictor


def ratio(choices: Choices, tuned: AutotuneStatus, predictor: Predictor) -> RatioPicture:
    """The controller's wish, if it is asked; else the simulator's recommendation."""
    wish = tuned.ratio is not None
    return RatioPicture(
        ratio=choices.ratio,
        lookahead=choices.lookahead,
        max_lag=choices.max_lag,
        recommended=tuned.ratio if wish else predictor.recommended,
        reason=tuned.reason if wish else predictor.reason,
        predicted=predictor.predicted,
        note=predictor.note(),
    )
