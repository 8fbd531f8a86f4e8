"""The live control loop in virtual time, over workloads whose speeds and learning were measured or modelled."""
