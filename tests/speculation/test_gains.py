"""What the engine's choice of drafts gains, on simulated machines.

Steps take given times, and a drafter is right with a given probability.
"""

from random import Random

import numpy as np
import pytest

from vllm_metal_lite.scheduler.request import Request
from vllm_metal_lite.scheduler.scheduler_output import SchedulerOutput, Segment
from vllm_metal_lite.speculation.speculator import Speculator

# Seconds of a step by the number of drafts of each request.
DENSE = (5.0, 6.8, 7.6, 8.6)
CROWD = (5.2, 8.0, 10.0, 12.0)
EXPERTS = (5.0, 8.0, 10.0, 13.0)
BIG = (20.0, 21.0, 23.0, 25.0)
LAUNCH = 0.5  # the host's share of a plain step


class Machine:
    """Runs answers one after another.

    noise: the relative standard deviation of a step's time.  slow: the factor of all times while
    the machine is busy: half of the time, and for 1,000 milliseconds on average.  follow: how much
    longer a plain step takes if the drafter follows, relative.
    """

    def __init__(self, times, right, count, noise=0.05, slow=1.0, follow=0.0, seed=1):
        self.times, self.right, self.count, self.noise = times, right, count, noise
        self.random, self.texts = Random(seed), {}
        self.factors, self.until, self.follow = [1.0, slow], 0.0, follow
        draft = lambda wanted: [[7] * most for _, most in wanted]  # noqa: E731
        self.speculator = Speculator(self.texts.__getitem__, draft, len(times) - 1)
        self.flying, self.before = None, 0  # before: the drafts of the last step
        self.now = self.spent = 0.0  # the clock, and the seconds at the factor 1

    def seconds(self, num_drafts):
        return self.times[num_drafts] * (1 + abs(self.random.gauss(0, self.noise)))

    def spend(self, seconds):
        """The time that a step of these seconds takes now."""
        while self.now > self.until:
            self.factors.reverse()
            self.until += self.random.expovariate(0.001)
        taken = seconds * self.factors[0]
        self.now, self.spent = self.now + taken, self.spent + seconds
        return taken

    def step(self, requests):
        """Returns the new tokens of each request.

        The host launches a plain step while the step before runs, whose time has the launch.  If a
        plain step waits for tokens instead, its own time has the launch.
        """
        drafted, launch = self.before > 0, LAUNCH * self.times[0]
        is_late = drafted or self.speculator.wants(requests)
        drafts = [[] for _ in requests]
        self.flush(-launch if is_late and not drafted else 0.0)
        if is_late:
            drafts = self.speculator.propose([(request, 99) for request in requests])
        segments, accepted = [], []
        for request, draft in zip(requests, drafts, strict=True):
            count = 0
            while count < len(draft) and self.random.random() < self.right:
                count += 1
            accepted.append(count)
            segments.append(Segment(request, 40, 1 + len(draft), (), draft_token_ids=draft))
        self.before = max(map(len, drafts))
        seconds = self.seconds(self.before) + launch * (is_late and not self.before)
        out = SchedulerOutput(segments, 0 if any(drafts) else len(segments))
        out.total_num_scheduled_tokens = sum(s.num_scheduled for s in segments)
        counts = [n for n, draft in zip(accepted, drafts, strict=True) if draft]
        out.has_drafts = self.before > 0
        self.flying = out, counts, seconds, is_late
        return [1 + count for count in accepted]

    def flush(self, less):
        """Record the step in flight."""
        if self.flying is not None:
            out, counts, seconds, is_late = self.flying
            follows = self.speculator.expects_drafts and not is_late
            taken = self.spend(seconds + less + self.follow * self.times[0] * follows)
            is_typical = out.has_drafts or not (is_late or less or follows)
            self.speculator.record(out, counts, taken if is_typical else None)
            self.flying = None

    def gain(self, num_answers=8, length=300):
        """The tokens a second of the last answers, relative to steps without drafts."""
        gains = []
        for answer in range(num_answers):
            requests = [Request(f"{answer}-{i}", [1], 9999) for i in range(self.count)]
            self.texts.clear()
            for i, request in enumerate(requests):
                self.texts[request] = np.arange(1000 * i, 1000 * i + 200, dtype=np.int32)
            left, self.spent = np.full(self.count, length), 0.0
            while (left > 0).any():
                left = left - self.step(requests)
            self.flush(0.0)
            gains.append(sum(self.seconds(0) for _ in range(length)) / self.spent)
        return float(np.mean(gains[2:]))


@pytest.mark.parametrize(
    ("slow", "follow", "cost"), [(1, 0, 0.02), (1, 0.2, 0.03), (1.45, 0.2, 0.03)]
)
@pytest.mark.parametrize(
    ("times", "count", "right", "least"),
    [
        (DENSE, 1, 0.8, 1.6),
        (DENSE, 1, 0.6, 1.2),
        (BIG, 1, 0.6, 1.6),
        (CROWD, 4, 0.8, 1.15),
        (EXPERTS, 1, 0.8, 1.1),
        (DENSE, 1, 0.3, 1),
        (DENSE, 1, 0.0, 1),
        (CROWD, 4, 0.6, 1),
        (CROWD, 4, 0.0, 1),
        (EXPERTS, 1, 0.6, 1),
        (EXPERTS, 1, 0.0, 1),
    ],
)
def test_drafts_gain_where_they_can_and_cost_little_elsewhere(
    times, count, right, least, slow, follow, cost
):
    """least: 1 where no drafts gain; then the attempts may have this cost."""
    machines = (Machine(times, right, count, 0.05, slow, follow, seed) for seed in range(4))
    gain = np.mean([machine.gain() for machine in machines])
    assert gain > (least if least > 1 else 1 - cost)
