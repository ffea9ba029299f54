// Flags -> Options -> Server, and signals -> Shutdown: the place to start reading.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "server/options.h"
#include "server/server.h"

namespace {

// A signal becomes a byte in this pipe, which main reads: nothing else happens in the handler.
// (Blocking the signals for sigwait does not do: OpenBLAS starts threads before main, which stay
// unblocked.)
int stop_pipe[2];

void OnStopSignal(int) {
  const int saved = errno;
  if (write(stop_pipe[1], "", 1) < 0) {
    // The pipe is full: many bytes wait for main already.
  }
  errno = saved;
}

void CatchStopSignals() {
  if (pipe2(stop_pipe, O_CLOEXEC) != 0) std::abort();
  fcntl(stop_pipe[1], F_SETFL, O_NONBLOCK);
  struct sigaction action = {};
  action.sa_handler = &OnStopSignal;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
}

void WaitForStopSignal() {
  char byte;
  while (read(stop_pipe[0], &byte, 1) < 0 && errno == EINTR) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  int exit_code = -1;
  const mambascope::Options options = mambascope::ParseOptions(argc, argv, &exit_code);
  if (exit_code >= 0) return exit_code;

  CatchStopSignals();             // a second signal changes nothing: the drain has its own limit
  std::signal(SIGPIPE, SIG_IGN);  // a reader that left is an error code, not a death

  auto server = mambascope::Server::Start(options);
  if (!server.ok()) {
    const std::string message(server.status().message());
    std::fprintf(stderr, "mambascope-server: %s\n", message.c_str());
    return 2;
  }
  WaitForStopSignal();
  (*server)->Shutdown();
  return 0;
}
