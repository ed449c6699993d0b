"""A model as data: the records from which weight loading, memory plan, cost model and kernel benchmarks are derived."""
