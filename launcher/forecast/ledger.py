"""The ledger of the forecasts of one text by one training folder: HOME/forecasts/ID.jsonl.

pilot      what a run on this machine gave, by its name; the last one of a name counts
forecast   what each size would be
"""

from __future__ import annotations

from sm_nanogpt.launcher.files.documents import parse
from sm_nanogpt.launcher.files.ledger import Ledger
from sm_nanogpt.launcher.forecast.table import Forecast, Pilot


class ForecastLedger(Ledger):
    """Raises ServiceError if an entry was changed."""

    @property
    def pilots(self) -> dict[str, Pilot]:
        """What each pilot gave, by its name."""
        pilots = dict[str, Pilot]()
        for entry in self.of("pilot"):
            pilots[entry["name"]] = parse(entry["outcome"], Pilot, self.path)
        return pilots

    @property
    def last_forecast(self) -> Forecast | None:
        forecasts = self.of("forecast")
        return parse(forecasts[-1], Forecast, self.path) if forecasts else None

    def add_pilot(self, name: str, pilot: Pilot) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.add("pilot", name=name, outcome=pilot.model_dump(mode="json"))

    def add_forecast(self, forecast: Forecast) -> None:
        self.add("forecast", **forecast.model_dump(mode="json"))
