"""What the scheduler sees and what it decides."""

from dataclasses import dataclass

from protocol.settings import started_samples
from protocol.settings.rollout import Admission, Cut, OnInstall, RoundOrder
from rollout_service.scheduler.admission import Forecast

NO_CAP = 1 << 62  # more groups than any buffer holds


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """The user's numbers. N = `batch_groups`, n = `group_samples`, N' = ceil(ratio * N), n' = `started_samples`."""

    batch_groups: int
    group_samples: int
    ratio: float
    lookahead: int
    max_lag: int
    max_sample_failures: int = 3
    cut: Cut = Cut.ABORT
    on_install: OnInstall = OnInstall.PARK
    admission: Admission = Admission.FIXED
    order: RoundOrder = RoundOrder.FIFO
    samples_ratio: float = 1.0

    @property
    def started_samples(self) -> int:
        """n' = ceil(samples_ratio * n): samples that a new group starts."""
        return started_samples(self.group_samples, self.samples_ratio)


@dataclass(frozen=True, slots=True)
class Observation:
    """The world at one moment.

    `slots`: sequences that the engines can decode at once, less what evaluations hold. `ready`: READY groups, offered
    ones included. `offered`: batches offered and not leased. `leased_untrained`: batches leased and not trained.
    `newest_version`/`newest_step`: the newest published policy and the step it comes after. `pending_version`: a
    published version that waits to be installed. `admission_room`: groups that the buffer's caps still admit.
    `kv_tokens`: tokens that the engines' KV caches hold, 0 if not known. `forecast`: predicted lengths, for policies
    that want them. `num_pooled`: samples that wait for their prompt to come up again.
    """

    now_s: float
    slots: int
    ready: int
    offered: int
    leased_untrained: int
    last_leased_step: int
    trained_step: int
    active_version: int
    newest_version: int
    newest_step: int
    pending_version: int | None = None
    generation_allowed: bool = True
    admission_room: int = NO_CAP
    kv_tokens: int = 0
    forecast: Forecast | None = None
    num_pooled: int = 0

    @property
    def outstanding(self) -> int:
        """Batches offered or leased but not trained."""
        return self.offered + self.leased_untrained

    def version_at(self, step: int) -> int:
        """Version that the trainer will hold when `step` starts, if each step that is still to be trained publishes.

        A step that was trained without publishing (its update was skipped) makes no version any more.
        """
        known_step = max(self.newest_step, self.trained_step)
        return self.newest_version + max(0, step - 1 - known_step)

    @property
    def next_unleased_version(self) -> int:
        """Version that the next unleased batch will be trained on."""
        return self.version_at(self.last_leased_step + 1)

    @property
    def fill_version(self) -> int:
        """Version that the batch being filled now will be trained on."""
        return self.version_at(self.last_leased_step + self.offered + 1)


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Round `number` begins; it fills one batch."""

    number: int
    target_groups: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Take this many new prompts into the buffer; their pooled samples go on unless a token is older than this."""

    num_groups: int
    oldest_version: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Run these samples, resumed ones first."""

    sample_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Park:
    """Abort these samples and park them. `cut`: because the batch is full."""

    sample_ids: tuple[str, ...]
    cut: bool


@dataclass(frozen=True, slots=True)
class Install:
    """Install the pending version; `keep`: with requests running."""

    version: int
    keep: bool


@dataclass(frozen=True, slots=True)
class OfferBatch:
    """The round is over: offer its batch."""

    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Engines die of this group's prompt: its waiting samples fail."""

    group_id: str
    sample_ids: tuple[str, ...]


Decision = BeginRound | Admit | Start | Park | Install | OfferBatch | GiveUp
