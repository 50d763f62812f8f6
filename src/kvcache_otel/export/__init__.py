"""From cells to the world: OTLP, Prometheus, or a MeterProvider that the process already has."""
