def threads_for(size):
    return 1
