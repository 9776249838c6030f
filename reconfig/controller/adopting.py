"""Adoption: takes operators that replicas have into a ledger that does not know them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from reconfig import adoption
from reconfig.adoption import Found
from reconfig.controller.claims import Claimant, Claims
from reconfig.controller.cluster_state import ClusterState
from reconfig.controller.context import ControllerContext
from stateflow.errors import AdoptionRefused
from stateflow.reports import AdoptedOperator
from stateflow.runtime.code_key import check_signed

log = logging.getLogger(__name__)


class Adopter:
    def __init__(self, context: ControllerContext, claims: Claims) -> None:
        self._context, self._claims = context, claims

    async def adopt(self, dry_run: bool, partial: bool) -> list[AdoptedOperator]:
        """Adopts every operator that replicas report and the ledger does not know, and returns what was found.

        Everything is checked before the first record. Replicas of another ledger are let in only after all operators
        are recorded.

        Args:
            dry_run: only report what there is.
            partial: also adopt operators with partitions that are missing or only sealed.

        Raises AdoptionRefused, unless ``dry_run``.
        """
        async with self._context.deploying, self._context.planning:
            return await self._adopt(self._claims.present(), dry_run, partial)

    async def _adopt(self, there: Sequence[Claimant], dry_run: bool, partial: bool) -> list[AdoptedOperator]:
        claims = [claimant.claim for claimant in there]
        found = adoption.find(claims, self._known)
        for each in found:
            each.conflicts += self._strangers(there, each.operator)
        if not dry_run:
            self._check(there, found, partial)
            await self._record(there, found)
        return [_told(each, not dry_run) for each in found]

    @property
    def _known(self) -> set[str]:
        return {*self._context.cluster.deployed, *self._context.cluster.planned}

    def _strangers(self, there: Sequence[Claimant], operator: str) -> list[str]:
        homes = self._context.cluster.roster.homes
        return [
            f"the name {claimant.info.name} belongs to another data directory in this ledger"
            for claimant in there
            if any(partition.operator == operator for partition in claimant.claim.held)
            and claimant.info.name in homes
            and homes[claimant.info.name].directory != claimant.home.directory
        ]

    def _check(self, there: Sequence[Claimant], found: Sequence[Found], partial: bool) -> None:
        if not there:
            raise AdoptionRefused(
                "no replica that answers has partitions unknown to this ledger",
                remedy="start the replicas with this controller's address, and run the command again",
            )
        own = self._context.ledger_id
        for name in sorted(self._known):
            foreign = adoption.claimants([c.claim for c in there if c.claim.ledger not in ("", own)], name)
            if foreign:
                raise AdoptionRefused(
                    "an operator on replicas of another ledger is also deployed in this one",
                    remedy="stop those replicas and keep their data directories, or adopt into an empty ledger",
                    operator=name,
                    replicas=" ".join(sorted(foreign)),
                )
        for each in found:
            if each.conflicts or each.spec is None:
                raise AdoptionRefused(
                    "; ".join(each.conflicts),
                    remedy="stop the replica that should not count, keep its data directory, and run the command again",
                    operator=each.operator,
                )
            check_signed(each.spec)
            if not each.whole and not partial:
                lacking = sorted([*each.missing, *each.sealed])
                raise AdoptionRefused(
                    f"{len(each.missing)} partitions are missing, {len(each.sealed)} exist only as copies sealed for "
                    "a move",
                    remedy="start the replicas that have them, and run the command again; with --partial, sealed "
                    "copies are served again and missing partitions wait for a checkpoint or their owner",
                    operator=each.operator,
                    partitions=" ".join(map(str, lacking[:20])) + (" …" if len(lacking) > 20 else ""),
                )

    async def _record(self, there: Sequence[Claimant], found: Sequence[Found]) -> None:
        context = self._context
        claims = [claimant.claim for claimant in there]
        for claimant in there:
            await context.record(ClusterState.register, claimant.info, claimant.home)
            context.members.expect(claimant.info.name)
        for each in found:
            assert each.spec is not None
            await context.record(ClusterState.adopt, each.spec, adoption.assignment(each, claims), each.granted)
            log.warning(
                "operator %s adopted: %d partitions, %d missing", each.operator, len(each.owners), len(each.missing)
            )
        for ledger in sorted({claim.ledger for claim in claims} - {"", context.ledger_id}):
            await context.record(ClusterState.adopt_ledger, ledger)
            log.warning("replicas of ledger %s now belong to ledger %s", ledger, context.ledger_id)


def _told(found: Found, done: bool) -> AdoptedOperator:
    return AdoptedOperator(
        found.operator,
        found.spec.partitions if found.spec else 0,
        tuple(sorted(found.owners)),
        tuple(sorted(found.sealed)),
        tuple(found.missing),
        tuple(found.conflicts),
        done,
    )
