def write_report(results):
    pass
