"""Runs the cluster's jobs: begins each once per due time, and resumes runs that an earlier controller began.

A run is an item of the ledger, named after its due time. An item can be created only once, so only the controller that
recorded the run begins it. The moves of a run carry its mark, so that the next leader finds what the run has begun and
does not begin it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from reconfig.controller import steps
from reconfig.controller.context import ControllerContext
from reconfig.controller.executor import RunRegistry
from reconfig.controller.folds import told
from reconfig.controller.history import past
from reconfig.controller.placing import Placing
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.sweeping import Checkpoints
from reconfig.decisions.jobs import Affinity, Do, Earliest, Go, Job, Node, Run, RunState, choose, due, next_at_us
from reconfig.decisions.plan import ReconfigurationState
from reconfig.decisions.policies import PolicyName
from stateflow.errors import REPORT_LOG, AlreadyThere, InvalidArgument, OperatorNotDeployed, StateflowError
from stateflow.reports import JobReport, JobRun, JobStage
from stateflow.types import node_of

log = logging.getLogger(__name__)
LOOK_S = 0.5
#: seconds for which the controller retries a stage that cannot begin yet
PATIENCE_S = 60.0


class Jobs:
    def __init__(
        self,
        context: ControllerContext,
        runs: RunRegistry,
        reconfigurations: Reconfigurations,
        placing: Placing,
        checkpoints: Checkpoints,
        me: Node,
    ) -> None:
        self._me = me
        self._context, self._cluster, self._runs = context, context.cluster, runs
        self._reconfigurations, self._placing, self._checkpoints = reconfigurations, placing, checkpoints
        self._book = context.cluster.jobs
        self._ordering = asyncio.Lock()
        self._there = asyncio.Event()  # there may be jobs
        self._waits: dict[str, str] = {}  # by id of a run under way: what the run waits for
        self._earliest = Earliest()
        self._trouble: dict[str, str] = {}  # by job: why it has not begun, as last logged

    # -- commands -----------------------------------------------------------------------------------------

    async def create(self, job: Job) -> JobReport:
        """Creates a job.

        Raises InvalidArgument for a definition that is not valid, a taken name or a time that has passed, and
        OperatorNotDeployed, UnknownSite or UnknownPartition.
        """
        job.prove(self._context.clock.now_us())
        if job.operator:
            self._cluster.operator(job.operator)
        # ``job.coordinator`` is not checked: controllers that have never led are not known here
        if job.workers is not None:
            job.workers.check(self._cluster.roster.nodes().values(), "nodes")
        self._check_target(job)
        async with self._ordering:
            if job.name in self._book.names():
                raise InvalidArgument("a job of that name exists", remedy="delete it first", job=job.name)
            await self._context.record(steps.define_job, job.name, job)
            self._there.set()
        return self.report(job.name)

    def _check_target(self, job: Job) -> None:
        """Checks that a job's replica, site and partitions exist; without them each of its runs would fail. Raises
        InvalidArgument, UnknownSite, UnknownPartition."""
        match job.do:
            case Do.DRAIN:
                self._reconfigurations.check_replica(job.to)
            case Do.MIGRATE:
                self._reconfigurations.check_target(job.operator, job.partitions, job.to)

    async def pause(self, name: str, paused: bool) -> JobReport:
        """Pauses or resumes a job. Raises InvalidArgument if there is no such job.

        A run under way continues. Runs that were due during the pause are skipped.
        """
        async with self._ordering:
            job = self._book.found(name)
            if job.paused != paused:
                await self._context.record(steps.define_job, name, replace(job, paused=paused))
        return self.report(name)

    async def delete(self, name: str) -> JobReport:
        """Deletes a job. Its runs stay in the ledger; one under way begins no further stage. Raises InvalidArgument if
        there is no such job."""
        async with self._ordering:
            found = self.report(name)
            await self._context.record(steps.define_job, name, None)
        return found

    async def run_now(self, name: str) -> JobReport:
        """Runs a job now, even if it is paused. Raises InvalidArgument if the job is already running, or not known."""
        async with self._ordering:
            job, newest = self._book.found(name), self._book.newest(name)
            if newest is not None and newest.state is RunState.IN_PROCESS:
                raise InvalidArgument("the job is already running", remedy="wait until it has ended", job=name)
            await self._begin(job, next_at_us(self._book.runs.get(name, []), self._context.clock.now_us()))
        return self.report(name)

    def report(self, name: str) -> JobReport:
        """Returns a job's report. Raises InvalidArgument if there is no such job."""
        return self._book.report(name, self._context.clock.now_us(), self._waits)

    def reports(self) -> list[JobReport]:
        return [self.report(name) for name in self._book.names()]

    def run(self, run_id: str) -> JobRun:
        """Returns the report of a run. Raises InvalidArgument if there is no such run."""
        return told(self._book.run(run_id), self._waits)

    # -- when it is time ----------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Resumes the runs that were under way, then begins runs when they are due. Never returns."""
        for run in self._book.under_way():
            self._carry_on(run)
        while True:
            if not self._book.there:
                self._there.clear()
                await self._there.wait()
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def _look(self) -> None:
        """Begins the jobs that are due. A job that cannot begin delays no other job, and is tried again at the next
        check."""
        async with self._ordering:
            self._earliest.keep(self._book.there)
            self._trouble = {name: why for name, why in self._trouble.items() if name in self._book.there}
            for job in list(self._book.there.values()):
                runs, now_us = self._book.runs.get(job.name, []), self._context.clock.now_us()
                try:
                    at_us = due(job, runs, now_us, self._earliest.at(job, runs, now_us))
                    if at_us is not None:
                        await self._begin(job, at_us)
                    self._trouble.pop(job.name, None)
                except Exception as error:  # noqa: BLE001 - it is logged
                    self._say(job.name, error)

    def _say(self, job: str, error: Exception) -> None:
        """Logs why a job is not begun, once for each reason."""
        why = f"{type(error).__name__}: {error}"
        if self._trouble.get(job) == why:
            return
        self._trouble[job] = why
        if isinstance(error, StateflowError):
            log.warning("job %s not started: %s", job, error)
        else:
            log.error("job %s not started: %s; %s", job, why, REPORT_LOG, exc_info=error)

    async def _begin(self, job: Job, at_us: int) -> None:
        operators = [job.operator] if job.operator else sorted(self._cluster.deployed)
        await self._context.record(steps.begin_run, job.name, at_us, operators)
        self._carry_on(self._book.runs[job.name][-1])

    def _carry_on(self, run: Run) -> None:
        self._context.spawn(self._run(run))

    async def _run(self, run: Run) -> None:
        try:
            state, ids, note = await self._done(run)
        except Exception as error:
            log.exception("%s: failed", run.mark)
            ids = self._cluster.begun_by(run.mark)
            state, note = RunState.FAILED, f"{type(error).__name__}: {error}; {REPORT_LOG}"
        finally:
            self._waits.pop(run.id, None)
        await self._context.record(steps.end_run, run, state, ids, note)
        log.info("%s: %s %s", run.mark, state, note)

    async def _done(self, run: Run) -> tuple[RunState, Sequence[str], str]:
        """Carries out a run, one operator per stage. Returns its state, its reconfigurations, and a note.

        Stages that are in the ledger already were carried out by an earlier leader. A run whose job has been deleted
        begins no further stage.
        """
        job, given_up, nodes = self._book.job_of(run), "", None
        if job is not None:
            coordinator = await self._waited_for(run, job.coordinator, lambda: [self._me], "controllers")
            workers = await self._waited_for(run, job.workers, self._nodes, "nodes")
            given_up, nodes = "; ".join(filter(None, (coordinator.note, workers.note))), workers.nodes
        left = []
        for operator in run.left(sorted(self._cluster.deployed)):
            there, begun = self._book.job_of(run), self._begun(run, operator)
            if there is not None:
                stage = await self._stage(run, there, operator, nodes)
            elif begun:
                stage = JobStage(operator, begun)
            else:
                left.append(operator)
                continue
            await self._context.record(steps.end_stage, run, stage)
            run = self._book.run(run.id)
        unreadable = self._book.unreadable.get(run.job)
        why = "the job was deleted before it began" if unreadable is None else str(unreadable.refused())
        if left and not run.stages:
            return RunState.FAILED, (), why
        ids = [each for stage in run.stages for each in stage.reconfigurations]
        failed = [f"{stage.operator}: {stage.error}" for stage in run.stages if stage.error]
        failed += [f"{operator}: {why}" for operator in left]
        failed += [each for each in ids if not await self._completed(each)]
        if failed:
            return RunState.FAILED, ids, "; ".join(filter(None, (f"failed: {', '.join(failed)}", given_up)))
        moves = sum(len(self._runs.found(each).report().moves) for each in ids)
        came = "taken" if job is not None and job.do is Do.CHECKPOINT else f"{moves} moves" if ids else "nothing to do"
        return RunState.PROCESSED, ids, "; ".join(filter(None, (came, given_up)))

    async def _waited_for(
        self, run: Run, affinity: Affinity | None, there: Callable[[], Sequence[Node]], what: str
    ) -> Go:
        """Waits until the job's affinity lets a run proceed, or the job is deleted. The waiting time counts from the
        run's start, so that a later leader continues the wait, or from an earlier time that the clock has shown since,
        because the run may have begun by a clock that was ahead and was put back.

        Args:
            there: returns the nodes that are present now.
            what: word for those nodes in messages, ``nodes`` or ``controllers``.
        """
        began_us = run.began_us
        while True:
            now_us = self._context.clock.now_us()
            began_us = min(began_us, now_us)
            waited_s = (now_us - began_us) / 1e6
            is_there = self._book.job_of(run) is not None
            found = choose(affinity if is_there else None, there(), waited_s, what)
            if isinstance(found, Go):
                self._waits.pop(run.id, None)
                return found
            if self._waits.get(run.id) != found.why:
                log.info("%s %s", run.mark, found.why)
            self._waits[run.id] = found.why
            await asyncio.sleep(LOOK_S)

    def _nodes(self) -> list[Node]:
        """Returns the nodes with at least one replica that answers."""
        there = {node_of(name) for name in self._context.alive()}
        return [node for name, node in self._cluster.roster.nodes().items() if name in there]

    def _begun(self, run: Run, operator: str) -> tuple[str, ...]:
        """Returns the reconfigurations of an operator that the run has begun."""
        begun, history = self._cluster.begun_by(run.mark), self._cluster.history
        return tuple(each for each in begun if past(history[each]).operator == operator)

    async def _stage(self, run: Run, job: Job, operator: str, nodes: Collection[str] | None) -> JobStage:
        """Carries out a run on one operator. If an earlier controller has begun the run's reconfigurations of this
        operator, begins nothing, and returns a stage that names those.
        """
        until = self._context.clock.monotonic() + PATIENCE_S
        while True:
            if begun := self._begun(run, operator):
                return JobStage(operator, begun)
            try:
                return JobStage(operator, tuple(await self._do(job, operator, run.mark, nodes)))
            except AlreadyThere:
                return JobStage(operator)
            except OperatorNotDeployed as error:  # the operator was undeployed after the run began
                return JobStage(operator, error="" if not job.operator else str(error))
            except StateflowError as error:  # replicas may not have registered yet with a new leader
                if not error.retryable or self._context.clock.monotonic() > until:
                    return JobStage(operator, error=str(error))
            except Exception as error:
                log.exception("%s: failed for operator %s", run.mark, operator)
                return JobStage(operator, error=f"{type(error).__name__}: {error}; {REPORT_LOG}")
            await self._context.pause()

    async def _completed(self, reconfiguration: str) -> bool:
        states = [report.state async for report in self._runs.watch(reconfiguration)]
        return states[-1] == ReconfigurationState.COMPLETED

    async def _do(self, job: Job, operator: str, mark: str, nodes: Collection[str] | None) -> list[str]:
        match job.do:
            case Do.REBALANCE:
                names = job.policies or (PolicyName.RING,)
                begun = await self._placing.place(operator, names, job.options, mark, nodes)
            case Do.MIGRATE:
                migrate = self._reconfigurations.migrate
                begun = [await migrate(operator, job.partitions, job.to, job.options, mark, nodes)]
            case Do.DRAIN:
                drain = self._reconfigurations.drain
                begun = await drain(job.to, job.options, mark, operator=operator, only=nodes)
            case Do.CHECKPOINT:
                await self._checkpoints.take(operator)
                begun = []
        return [each.id for each in begun]
