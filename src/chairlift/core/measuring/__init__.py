"""What only observes the scheduler: waits, slots, times and events. Nothing here has an influence on a decision."""
