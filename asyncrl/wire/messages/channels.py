"""Lists the messages of each channel: one tagged union a direction and role, with one typed decoder each.

A message is a header (one of these structs, msgpack) and zero or more opaque frames.
"""

from asyncrl.wire.messages.engine import (
    KeeperBeat,
    KeeperHello,
    OpenedVersion,
    OpenVersion,
    ReadBytes,
    VersionBytes,
    VersionGone,
)
from asyncrl.wire.messages.shared import (
    Enrol,
    Enrolled,
    Invite,
    Loaded,
    LoadWeights,
    ObserverHello,
    Prefetch,
    Replace,
    RunEnd,
    Status,
    StepReport,
    Stop,
    Welcome,
)
from asyncrl.wire.messages.trainer import (
    Checkpointed,
    Commit,
    Committed,
    GaveUp,
    PlanReceived,
    PlanRequest,
    Probed,
    Published,
    StartPlan,
    TrainerBeat,
    TrainerHello,
    WorkPlan,
)
from asyncrl.wire.messages.worker import (
    Ack,
    Assign,
    Cancel,
    Clock,
    Engines,
    Fenced,
    Heartbeat,
    Leave,
    Record,
    WorkerHello,
)

FromWorker = WorkerHello | Heartbeat | Leave | Loaded
FromKeeper = KeeperHello | KeeperBeat | Leave | Loaded
FromTrainer = TrainerHello | TrainerBeat | Commit | Probed | Published | Checkpointed | GaveUp
FromObserver = ObserverHello | Invite | Stop
FromTrainerBulk = PlanRequest | PlanReceived
AnyControl = FromWorker | FromKeeper | FromTrainer | FromObserver | Enrol
AnyBulk = Record | FromTrainerBulk
# By the role of the sender: the coordinator takes nothing else from it.
ToCoordinatorControl = {
    "rollout": FromWorker,
    "engine": FromKeeper,
    "trainer": FromTrainer,
    "observer": FromObserver,
    "token": Enrol,
}
ToCoordinatorBulk = {"rollout": Record, "trainer": FromTrainerBulk}
ToVersionServer = {"rollout": OpenVersion | ReadBytes, "engine": OpenVersion | ReadBytes}
ToVersionReader = OpenedVersion | VersionBytes | VersionGone
ToWorkerControl = Welcome | Assign | Cancel | LoadWeights | Engines | Clock | Stop
ToKeeper = Welcome | Prefetch | LoadWeights | Stop
ToWorkerBulk = Ack | Fenced
ToTrainerControl = Welcome | Committed | Stop
ToTrainerBulk = WorkPlan | StartPlan
ToToken = Enrolled
ToObserver = Welcome | Status | StepReport | Replace | RunEnd | Stop
