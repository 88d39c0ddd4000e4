"""The parts that all simulators share: scheduler, clocks, trace, reports, golden stories and mutants."""
