"""Conformance tests for policies, schedules and admissions of any package.

Subclass a contract in a test module of yours, and let pytest run it::

    from thermocline.testing import PolicyContract
    from my_package import MyPolicy

    class TestMyPolicy(PolicyContract):
        policy = MyPolicy

Every fault is a :class:`ContractBroken`, whose message says what the class did. Nothing here waits for a clock.
"""

from thermocline.testing.broken import ContractBroken
from thermocline.testing.decision_contracts import AdmissionContract, ScheduleContract
from thermocline.testing.policy_contract import PolicyContract

__all__ = ["AdmissionContract", "ContractBroken", "PolicyContract", "ScheduleContract"]
