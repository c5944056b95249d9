"""The metrics, of requests whose figures are known. `.ci/peers` runs these tests first."""

import unittest

import measure
from driver import Request

MS = measure.MS


def request(called, granted, released, **more):
    """Times in milliseconds; due when it is called."""
    times = {"due": called, "called": called, "sent": called, "granted": granted, "let_go": released} | more
    return Request(hold=0, **{name: MS * time for name, time in times.items()})


def numbered(*requests):
    for number, one in enumerate(requests):
        one.id = number
    return list(requests)


class Metrics(unittest.TestCase):
    def test_overlaps_are_counted_to_the_release_the_loss_or_the_kill(self):
        requests = [request(1, 10, 30), request(1, 10, 50, lost=20), request(1, 10, 0, killed=25), request(1, 28, 40)]
        found = measure.slots(requests, 2, 0, 100 * MS)
        self.assertEqual(found["peak"], 3)
        self.assertAlmostEqual(found["over_slot_s"], 0.010)  # three from 10 to 20

    def test_a_slot_is_idle_while_it_is_free_and_wanted(self):
        requests = [request(1, 10, 30), request(20, 35, 40)]
        found = measure.slots(requests, 1, 0, 100 * MS)
        # Wanted from 1 to 10 and from 20 to 35, free and wanted from 1 to 10 and from 30 to 35.
        self.assertAlmostEqual(found["idle"], 100 * (9 + 5) / (9 + 15))

    def test_a_grant_out_of_order_is_an_inversion(self):
        late, early = request(50, 60, 70), request(1, 100, 110)
        self.assertEqual(measure.inversions(numbered(late, early)), 50)
        self.assertEqual(measure.inversions(numbered(request(1, 60, 70), request(50, 100, 110))), 0)
        # Called or granted at nearly the same time: either order will do.
        self.assertEqual(measure.inversions(numbered(request(8, 60, 70), request(1, 100, 110))), 0)
        self.assertEqual(measure.inversions(numbered(request(50, 60, 70), request(1, 64, 74))), 0)

    def test_a_handover_is_from_a_release_to_the_next_grant(self):
        found = measure.handovers([request(1, 2, 30), request(5, 33, 50), request(60, 61, 70)])
        self.assertEqual((found["count"], found["p50"]), (1, 3))

    def test_waits_without_a_grant_count_until_the_end(self):
        found = measure.waits([request(0, 5, 9), request(0, 0, 0)], 100 * MS)
        self.assertEqual((found["p50"], found["longest"]), (100, 100))

    def test_normal_again_after_the_last_bad_second(self):
        requests = [request(10 * one, 10 * one + 1, 10 * one + 5) for one in range(1, 100)]
        requests += [request(1_000 + 10 * one, 3_000, 3_001) for one in range(50)]
        requests += [request(3_000 + 10 * one, 3_001 + 10 * one, 3_005 + 10 * one) for one in range(200)]
        found = measure.seconds_until_normal(requests, 1_000 * MS, 5_000 * MS)
        # The last late request is due half a second after the fault.
        self.assertTrue(1.3 <= found <= 1.6, found)
        self.assertEqual(measure.seconds_until_normal(requests[:99], 1_000 * MS, 5_000 * MS), 0)

    def test_the_worst_second_slides(self):
        times = [MS * time for time in (0, 600, 900, 1_100, 1_590, 3_000)]
        self.assertEqual(measure.worst_second(times), 4)


if __name__ == "__main__":
    unittest.main()
