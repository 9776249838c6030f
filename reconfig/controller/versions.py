"""Versions of operators, and the bundles of their code, which the ledger's database keeps and replicas fetch."""

from __future__ import annotations

import logging
from datetime import timedelta

from reconfig.controller.cluster_state import Deployed
from reconfig.controller.context import ControllerContext
from reconfig.controller.deployments import Deployments
from stateflow.errors import BundleMissing, InvalidArgument, StateflowError, VersionUnknown
from stateflow.runtime.bundles import PACKED_MAX, check
from stateflow.types import BUNDLE_PART, OperatorSpec

log = logging.getLogger(__name__)
#: age at which a bundle that no version names is dropped; a younger one may be about to be deployed
UNUSED = timedelta(hours=1)


class Versions:
    """Stores bundles, and serves earlier versions again. Methods raise Unavailable where the ledger does not answer."""

    def __init__(self, context: ControllerContext, deployments: Deployments) -> None:
        self._context, self._deployments = context, deployments

    async def put(self, digest: str, number: int, count: int, data: bytes) -> None:
        """Stores a part of a bundle. Raises InvalidArgument."""
        if not (number < count <= -(-PACKED_MAX // BUNDLE_PART) and 0 < len(data) <= BUNDLE_PART):
            raise InvalidArgument(
                f"a bundle has {PACKED_MAX >> 20} parts of 1 MB at most",
                remedy="install large dependencies at the sites",
            )
        await self._context.aside(self._context.cluster.ledger.put_bundle_part, digest, number, count, data)

    async def part(self, digest: str, number: int) -> tuple[bytes, int]:
        """Returns a part of a bundle, and the number of its parts. Raises BundleMissing."""
        found = await self._context.aside(self._context.cluster.ledger.bundle_part, digest, number)
        if found is None:
            raise _missing(digest)
        body, count = found
        return body, count

    async def check_here(self, spec: OperatorSpec) -> None:
        """Checks, before anything is decided, that a version's bundle is here. Raises BundleMissing, BundleDamaged."""
        if spec.bundle:
            await self._context.aside(self._check, spec.bundle)

    def _check(self, digest: str) -> None:
        ledger, packed, count, number = self._context.cluster.ledger, bytearray(), 1, 0
        while number < count:
            found = ledger.bundle_part(digest, number)
            if found is None:
                raise _missing(digest)
            packed += found[0]
            count, number = found[1], number + 1
        check(bytes(packed), digest)

    def of(self, operator: str) -> list[OperatorSpec]:
        """Returns the versions of an operator, in order; the last one serves. Raises OperatorNotDeployed."""
        return list(self._context.cluster.operator(operator).versions)

    async def upgrade(self, operator: str, number: int) -> Deployed:
        """Deploys an earlier version again, which becomes the newest one. ``number``: counted from 1.

        Raises OperatorNotDeployed, VersionUnknown, BundleMissing, and the error by which a replica refuses the version;
        nothing is changed then.
        """
        spec = self.version(operator, number)
        await self.check_here(spec)
        return await self._deployments.deploy(spec)

    def version(self, operator: str, number: int) -> OperatorSpec:
        """Returns a version that was deployed, counted from 1. Raises OperatorNotDeployed, VersionUnknown."""
        versions = self.of(operator)
        if not 0 < number <= len(versions):
            raise VersionUnknown(
                f"there is no version {number}, the versions are 1 to {len(versions)}",
                remedy=f"see `stateflow operator versions {operator}`",
                operator=operator,
            )
        return versions[number - 1]

    async def drop_unused(self) -> None:
        """Drops bundles that no version names and that are older than ``UNUSED``."""
        cluster = self._context.cluster
        planned = [deployed for deployed, _ in cluster.planned.values()]
        named = {spec.bundle for each in [*cluster.deployed.values(), *planned] for spec in each.versions}
        try:
            if dropped := await self._context.aside(self._context.cluster.ledger.drop_other_bundles, named, UNUSED):
                log.info("%d parts of unused bundles dropped", dropped)
        except StateflowError as error:
            log.warning("unused bundles not dropped: %s", error)


def _missing(digest: str) -> BundleMissing:
    return BundleMissing(
        "the ledger lacks the bundle, or a part of it", remedy="deploy the operator again", bundle=digest
    )
