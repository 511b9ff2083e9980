"""Lists the messages of each channel: a tagged union for each direction and role, with a typed decoder each.

A message is a header (a struct of this package, msgpack) and zero or more opaque frames.
"""

from asyncrl.wire.messages import engine, shared, trainer, worker

FromWorker = (
    worker.WorkerHello
    | worker.WorkerHeartbeat
    | worker.Leave
    | shared.Loaded
    | shared.ProbeSamples
    | shared.Slept
)
FromSupervisor = (
    engine.SupervisorHello
    | engine.SupervisorHeartbeat
    | worker.Leave
    | shared.Loaded
    | shared.ProbeSamples
    | shared.Slept
)
FromTrainer = (
    trainer.AskDevices
    | trainer.TrainerHello
    | trainer.TrainerHeartbeat
    | trainer.Commit
    | trainer.Probed
    | trainer.Published
    | trainer.ScoredSamples
    | trainer.Checkpointed
    | trainer.GaveUp
)
FromObserver = shared.ObserverHello | shared.Invite | shared.Stop
Record = worker.Record  # inside of Records
FromTrainerBulk = trainer.PlanRequest | trainer.PayloadRequest | shared.ImageRequest
AnyControl = FromWorker | FromSupervisor | FromTrainer | FromObserver | shared.Enrol
AnyBulk = worker.Records | shared.ImageRequest | FromTrainerBulk | shared.WrittenBytes
# By the role of the sender, from which the coordinator accepts no further messages.
ToCoordinatorControl = {
    "rollout": FromWorker,
    "engine": FromSupervisor,
    "scorer": engine.SupervisorHello | engine.SupervisorHeartbeat | worker.Leave,
    "trainer": FromTrainer,
    "observer": FromObserver,
    "token": shared.Enrol,
}
ToCoordinatorBulk = {
    "rollout": worker.Records | shared.ImageRequest | shared.WrittenBytes,
    "engine": shared.WrittenBytes,
    "scorer": shared.WrittenBytes,
    "trainer": FromTrainerBulk | shared.WrittenBytes,
}
ToVersionServer = {
    "rollout": engine.OpenVersion | engine.ReadBytes,
    "engine": engine.OpenVersion | engine.ReadBytes,
}
ToVersionReader = engine.OpenedVersion | engine.VersionBytes | engine.VersionGone
ToWorkerControl = (
    shared.Welcome
    | worker.Assign
    | worker.Cancel
    | shared.LoadWeights
    | shared.Sleep
    | worker.Engines
    | worker.MinVersion
    | shared.Stop
)
ToSupervisor = shared.Welcome | shared.Prefetch | shared.LoadWeights | shared.Sleep | shared.Stop
ToWorkerBulk = worker.Ack | worker.Fenced | shared.ImageFiles
ToTrainerControl = shared.Welcome | trainer.GrantDevices | trainer.Committed | shared.Stop
ToTrainerBulk = trainer.WorkPlan | trainer.Payloads | shared.ImageFiles
ToFileSender = shared.WrittenTaken
ToToken = shared.Enrolled
ToObserver = shared.Welcome | shared.Status | shared.StepReport | shared.Replace | shared.RunEnd | shared.Stop
