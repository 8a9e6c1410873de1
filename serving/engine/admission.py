"""Who is next: a bounded queue that takes tenants in turns, so that one with many requests delays only itself."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from serving.engine.errors import QueueFullError

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First come, first served within a tenant; tenants in turns. Not thread-safe: its owner holds a lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, item: Item) -> None:
        """Add to the tenant's end of the queue; QueueFullError beyond the limit."""
        if self._count >= self.limit:
            raise QueueFullError(f"{self._count} requests are waiting and {self.limit} are allowed; try again later")
        self._waiting.setdefault(tenant, deque()).append(item)
        self._count += 1

    def pop(self) -> Item:
        """The next item; its tenant goes to the end of the line."""
        tenant, items = next(iter(self._waiting.items()))
        item = items.popleft()
        self._count -= 1
        del self._waiting[tenant]
        if items:
            self._waiting[tenant] = items
        return item

    def remove(self, tenant: str, item: Item) -> bool:
        """Take one item out, wherever it stands; false if it is not waiting."""
        items = self._waiting.get(tenant)
        if items is None or item not in items:
            return False
        items.remove(item)
        self._count -= 1
        if not items:
            del self._waiting[tenant]
        return True

    def all(self) -> list[Item]:
        """Everything that waits, in no particular order."""
        return [item for items in self._waiting.values() for item in items]
