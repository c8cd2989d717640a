"""Policy versions and the audit record of live settings, on Redis."""

import json
from typing import Any

from buffer.scripts import Store, new_nonce
from protocol.errors import NotFoundError
from protocol.messages import Policy, PolicyState, SettingsChange


class Policies:
    """Versions: a JSON body that never changes, a state, and an outcome; and the settings' audit record."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._keys = store.keys

    async def publish(self, step: int, path: str, trainer_epoch: int) -> Policy:
        """See `ContinuationBuffer.publish_policy`."""
        body = json.dumps({"step": step, "trainer_epoch": trainer_epoch, "path": path})
        (version,) = await self._store.transition("publish_policy", [], [trainer_epoch, step, body])
        return await self._one(version)

    async def set_state(self, version: int, state: PolicyState, error: str | None, install_s: float | None) -> Policy:
        """See `ContinuationBuffer.set_policy_state`."""
        outcome = json.dumps({"error": error, "install_s": install_s})
        await self._store.transition("set_policy_state", [], [version, state.value, outcome])
        if state is PolicyState.ACTIVE:
            await self._store.sync()
        return await self._one(version)

    async def all(self) -> list[Policy]:
        """See `ContinuationBuffer.policies`."""
        fields: dict[bytes, bytes] = await self._store.one("HGETALL", self._keys.named("policies"))
        versions = sorted(int(name) for name in fields if name.isdigit())
        return [_decode(v, fields[b"%d" % v], fields[b"%d:state" % v], fields.get(b"%d:outcome" % v)) for v in versions]

    async def record_change(self, change: SettingsChange) -> None:
        """See `ContinuationBuffer.record_change`."""
        await self._store.transition("record_change", [], [new_nonce(), change.model_dump_json()])

    async def changes(self) -> list[SettingsChange]:
        """See `ContinuationBuffer.changes`."""
        lines: list[bytes] = await self._store.one("LRANGE", self._keys.named("changes"), 0, -1)
        return [SettingsChange.model_validate_json(line) for line in lines]

    async def _one(self, version: int) -> Policy:
        fields = (str(version), f"{version}:state", f"{version}:outcome")
        body, state, outcome = await self._store.one("HMGET", self._keys.named("policies"), *fields)
        if body is None:
            raise NotFoundError(f"there is no policy version {version}: publish it first")
        return _decode(version, body, state, outcome)


def _decode(version: int, body: bytes, state: bytes, outcome: bytes | None) -> Policy:
    fields: dict[str, Any] = json.loads(body) | (json.loads(outcome) if outcome else {})
    return Policy(version=version, state=PolicyState(state.decode()), **fields)
