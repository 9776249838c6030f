"""Jobs of the cluster: begun when they are due, each time once, and carried on by the next controller.

A run is an item of the ledger, named by the time it is for: it is begun by the one that recorded it, and there is one
for ever. Its moves carry its mark, so that whoever takes over finds what it had begun, and begins it no second time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from reconfig.controller.checkpoints import Checkpoints
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from reconfig.controller.placing import Placing
from reconfig.controller.reconfigurations import Reconfigurations
from reconfig.controller.run_registry import RunRegistry
from reconfig.jobs import Do, Job, Run, RunState, due, next_us
from reconfig.placement import PolicyName
from reconfig.work import ReconfigurationState
from stateflow.errors import REPORT_LOG, AlreadyThere, InvalidArgument, StateflowError
from stateflow.reports import JobReport, JobRun

log = logging.getLogger(__name__)
LOOK_S = 0.5
#: a run that cannot be begun now, but may be soon, is tried for so long
PATIENCE_S = 60.0


class Jobs:
    def __init__(
        self,
        context: ControllerContext,
        runs: RunRegistry,
        reconfigurations: Reconfigurations,
        placing: Placing,
        checkpoints: Checkpoints,
    ) -> None:
        self._context, self._cluster, self._runs = context, context.cluster, runs
        self._reconfigurations, self._placing, self._checkpoints = reconfigurations, placing, checkpoints
        self._book = context.cluster.jobs
        self._ordering = asyncio.Lock()
        self._there = asyncio.Event()  # there may be jobs

    # -- commands -----------------------------------------------------------------------------------------

    async def create(self, job: Job) -> JobReport:
        """Raises InvalidArgument, also for a name that there is and a time that has passed; OperatorNotDeployed."""
        job.check()
        if job.operator:
            self._cluster.operator(job.operator)
        async with self._ordering:
            if job.name in self._book.there:
                raise InvalidArgument("there is a job of that name", remedy="delete it first", job=job.name)
            if 0 < job.schedule.once_us <= self._context.clock.now_us():
                raise InvalidArgument("that time has passed", remedy="name one to come", job=job.name)
            await self._context.record(ClusterState.define_job, job.name, job)
            self._there.set()
        return self.report(job.name)

    async def pause(self, name: str, paused: bool) -> JobReport:
        """Or go on: what was due meanwhile is not made up for. A run under way goes on. Raises InvalidArgument."""
        async with self._ordering:
            job = self._found(name)
            if job.paused != paused:
                await self._context.record(ClusterState.define_job, name, replace(job, paused=paused))
        return self.report(name)

    async def delete(self, name: str) -> JobReport:
        """Its runs stay in the ledger. Raises InvalidArgument."""
        async with self._ordering:
            found = self.report(self._found(name).name)
            await self._context.record(ClusterState.define_job, name, None)
        return found

    async def run_now(self, name: str) -> JobReport:
        """Also one that is paused. Raises InvalidArgument while it runs."""
        async with self._ordering:
            job, newest = self._found(name), self._book.newest(name)
            if newest is not None and newest.state is RunState.IN_PROCESS:
                raise InvalidArgument("the job runs already", remedy="wait until it has ended", job=name)
            await self._begin(job, self._context.clock.now_us())
        return self.report(name)

    def report(self, name: str) -> JobReport:
        """Raises InvalidArgument."""
        job, runs = self._found(name), self._book.runs.get(name, [])
        newest = runs[-1] if runs else None
        return JobReport(
            name,
            job.schedule.text,
            str(job.do),
            job.operator,
            tuple(map(str, job.policies)),
            job.partitions,
            job.to,
            job.paused,
            next_us(job, newest, self._context.clock.now_us()),
            tuple(
                JobRun(run.at_us, run.began_us, run.ended_us, str(run.state), run.reconfigurations, run.note)
                for run in runs
            ),
        )

    def reports(self) -> list[JobReport]:
        return [self.report(name) for name in sorted(self._book.there)]

    def _found(self, name: str) -> Job:
        try:
            return self._book.there[name]
        except KeyError:
            raise InvalidArgument(f"there is no job {name!r}", remedy="see `stateflow job list`") from None

    # -- when it is time ----------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Carry on with what was under way, and begin what is due."""
        for run in self._book.under_way():
            self._carry_on(run, self._cluster.begun_by(run.mark))
        while True:
            if not self._book.there:
                self._there.clear()
                await self._there.wait()
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except StateflowError as error:
                log.warning("no job is begun: %s", error)
            except Exception:
                log.exception("no job is begun")

    async def _look(self) -> None:
        async with self._ordering:
            for job in list(self._book.there.values()):
                at_us = due(job, self._book.newest(job.name), self._context.clock.now_us())
                if at_us is not None:
                    await self._begin(job, at_us)

    async def _begin(self, job: Job, at_us: int) -> None:
        run = await self._context.record(ClusterState.begin_run, job.name, at_us)
        self._carry_on(run, [])

    def _carry_on(self, run: Run, begun: list[str]) -> None:
        self._context.spawn(self._run(run, begun))

    async def _run(self, run: Run, begun: list[str]) -> None:
        try:
            state, ids, note = await self._done(run, begun)
        except Exception as error:
            log.exception("%s", run.mark)
            state, ids, note = RunState.FAILED, begun, f"{type(error).__name__}: {error}; {REPORT_LOG}"
        await self._context.record(ClusterState.end_run, run, state, ids, note)
        log.info("%s: %s %s", run.mark, state, note)

    async def _done(self, run: Run, ids: list[str]) -> tuple[RunState, Sequence[str], str]:
        """Args: ids: reconfigurations that it has begun already."""
        job, until = self._book.there.get(run.job), self._context.clock.monotonic() + PATIENCE_S
        while not ids and job is not None:
            try:
                ids = await self._do(job, run.mark)
                break
            except AlreadyThere as error:
                return RunState.PROCESSED, (), error.what
            except StateflowError as error:  # replicas may be about to register with a controller that has just begun
                if not error.retryable or self._context.clock.monotonic() > until:
                    return RunState.FAILED, (), str(error)
            await asyncio.sleep(self._context.settings.retry_interval_s)
            ids = self._cluster.begun_by(run.mark)  # perhaps of one operator, before it failed of another
        if job is None and not ids:
            return RunState.FAILED, (), "the job was deleted before it began"
        failed = [each for each in ids if not await self._completed(each)]
        if failed:
            return RunState.FAILED, ids, f"failed: {', '.join(failed)}"
        moves = sum(len(self._runs.found(each).report().moves) for each in ids)
        return RunState.PROCESSED, ids, f"{moves} moves" if job is None or job.do is not Do.CHECKPOINT else "taken"

    async def _completed(self, reconfiguration: str) -> bool:
        states = [report.state async for report in self._runs.watch(reconfiguration)]
        return states[-1] == ReconfigurationState.COMPLETED

    async def _do(self, job: Job, mark: str) -> list[str]:
        match job.do:
            case Do.REBALANCE:
                names = job.policies or (PolicyName.RING,)
                begun = await self._placing.place(job.operator, names, job.options, mark)
            case Do.MIGRATE:
                one = await self._reconfigurations.migrate(job.operator, job.partitions, job.to, job.options, mark)
                begun = [one]
            case Do.DRAIN:
                begun = await self._reconfigurations.drain(job.to, job.options, mark)
            case Do.CHECKPOINT:
                await self._checkpoints.take(job.operator)
                begun = []
        return [each.id for each in begun]
