"""``fedloom`` of two sites: bob's update is one number throughout, and dan breaks down after it has shared its keys."""

from fedloom.cli import main
from fedloom.errors import SiteRefusal
from fedloom.methods import METHODS
from fedloom.types import Client, Order, Reply
from marker import Marked


class MarkedOrBroken(Marked):
    def local(self, client: Client, order: Order) -> Reply:
        if client.name == "dan":
            raise SiteRefusal("training broke down")
        return super().local(client, order)


if __name__ == "__main__":
    METHODS["fedit"] = MarkedOrBroken  # type: ignore[index]
    main()
