"""The stock of a shop. Each episode gets one object; its public methods are the model's tools."""

from asyncrl.tools import ToolError


class Inventory:
    def reset(self, sample):
        self.stock = dict(sample.extra_info["stock"])  # {"1": 4, "2": 7, …}
        self.counted = []

    def count(self, part: int) -> int:
        """Count a part."""
        self.counted.append(str(part))
        return self.stock.get(str(part), 0)

    def take(self, part: int, number: int) -> int:
        """Take a number of a part."""
        if not 0 < number <= self.stock.get(str(part), 0):
            raise ToolError("not so many")  # the model reads this text

        self.stock[str(part)] -= number
        return self.stock[str(part)]

    def result(self) -> dict:
        return {"stock": self.stock, "counted": self.counted}  # for the reward function
