// Prints in how many nanoseconds a value travels from one processor to another and back.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TURNS = 20000, BLOCKS = 25 };

static atomic_int turn;

static void pin(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof set, &set)) exit(1);
}

static void *answer(void *processor) {
  pin(*(int *)processor);
  for (int i = 0; i < TURNS * BLOCKS; i++) {
    while (atomic_load_explicit(&turn, memory_order_acquire) != 1) {}
    atomic_store_explicit(&turn, 0, memory_order_release);
  }
  return NULL;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

int main(int count, char **arguments) {
  if (count != 3) return 2;
  int processors[] = {atoi(arguments[1]), atoi(arguments[2])};
  pthread_t thread;
  pin(processors[0]);
  if (pthread_create(&thread, NULL, answer, &processors[1])) return 1;
  double least = 1;
  for (int block = 0; block < BLOCKS; block++) {
    double start = seconds();
    for (int i = 0; i < TURNS; i++) {
      atomic_store_explicit(&turn, 1, memory_order_release);
      while (atomic_load_explicit(&turn, memory_order_acquire) != 0) {}
    }
    double passed = (seconds() - start) / TURNS;
    if (passed < least) least = passed;
  }
  pthread_join(thread, NULL);
  printf("%.0f\n", least * 1e9);
  return 0;
}
