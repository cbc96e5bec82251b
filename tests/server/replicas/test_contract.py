"""What holds of one server holds of many processes behind one address: its tests, asked of a front."""

__all__ = [name for name in dir() if name.startswith("test_")]
