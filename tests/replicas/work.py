"""Small fleets and requests for the tests of the fleet."""

from __future__ import annotations

from policies import CandidateId, CostModel
from router.replicas import Booking, Fleet, HealthRules, Lease, Replica, ServedModel
from router.replicas.ledger import NO_FOREIGN, Foreign, Ledger

UNIT = CostModel(base_ms=0.0, ms_per_token=1.0, ms_per_mtoken2=0.0)
"""A token takes a millisecond and nothing else takes time: figures can be read off."""


def replica(name: str, *, models: tuple[str, ...] = ("m",), num_ranks: int = 1) -> Replica:
    return Replica(
        name=name,
        url=f"http://{name}:8000",
        models=tuple(ServedModel(id=model) for model in models),
        num_ranks=num_ranks,
        block_size=16,
        num_blocks=100,
    )


def fleet_of(*names: str, rules: HealthRules | None = None) -> Fleet:
    fleet = Fleet(rules=rules, prior=UNIT)
    for name in names:
        fleet.members.add(replica(name))
    return fleet


def send(
    fleet: Fleet,
    candidate: str,
    now_s: float,
    *,
    tokens: int = 100,
    streams: bool = True,
) -> Lease:
    booking = Booking(
        num_uncached_tokens=tokens,
        num_cached_tokens=0,
        streams=streams,
    )
    return fleet.load.admit(CandidateId(candidate), booking, now_s)


def book(
    ledger: Ledger,
    number: int,
    now_s: float,
    *,
    tokens: int = 100,
    cached: int = 0,
    streams: bool = True,
    model: CostModel = UNIT,
    foreign: Foreign = NO_FOREIGN,
) -> Lease:
    booking = Booking(num_uncached_tokens=tokens, num_cached_tokens=cached, streams=streams)
    return ledger.admit(number, CandidateId("r"), booking, model, foreign, now_s)
