"""Parts of the default eviction policy, :mod:`services.scheduler.policies.thermocline`."""
