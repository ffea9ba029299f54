// Flags -> Options -> Server, and signals -> Shutdown: the place to start reading.
#include <pthread.h>

#include <csignal>
#include <cstdio>
#include <string>

#include "server/options.h"
#include "server/server.h"

int main(int argc, char** argv) {
  int exit_code = -1;
  const mambascope::Options options = mambascope::ParseOptions(argc, argv, &exit_code);
  if (exit_code >= 0) return exit_code;

  // Blocked before any thread starts, so that all inherit it; taken below by sigwait: nothing ever
  // runs in a signal handler.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);  // a reader that left is an error code, not a death

  auto server = mambascope::Server::Start(options);
  if (!server.ok()) {
    const std::string message(server.status().message());
    std::fprintf(stderr, "mambascope-server: %s\n", message.c_str());
    return 2;
  }
  int signal = 0;
  sigwait(&stop_signals, &signal);
  (*server)->Shutdown();
  return 0;
}
