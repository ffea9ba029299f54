#include "client/cli/interrupt.h"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <mutex>
#include <thread>
#include <utility>

#include "client/cli/errors.h"

namespace mambascope::cli {
namespace {

struct Interrupt {
  std::mutex mu;
  grpc::ClientContext* context = nullptr;  // guarded by mu
  bool interrupted = false;                // guarded by mu
};

// Never destroyed: the waiting thread may outlive main.
Interrupt& State() {
  static Interrupt* const state = new Interrupt;
  return *state;
}

void WaitForSignals(const sigset_t& signals) {
  for (;;) {
    int signal = 0;
    if (sigwait(&signals, &signal) != 0) continue;
    std::lock_guard lock(State().mu);
    if (State().context == nullptr || std::exchange(State().interrupted, true)) {
      _exit(kInterrupted);
    }
    State().context->TryCancel();
  }
}

}  // namespace

void InstallInterrupt() {
  struct sigaction action = {};
  if (sigaction(SIGINT, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) return;
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::thread([signals] { WaitForSignals(signals); }).detach();
}

InterruptibleCall::InterruptibleCall(grpc::ClientContext* context) {
  std::lock_guard lock(State().mu);
  State().context = context;
}

InterruptibleCall::~InterruptibleCall() {
  std::lock_guard lock(State().mu);
  State().context = nullptr;
}

bool InterruptibleCall::interrupted() const {
  std::lock_guard lock(State().mu);
  return State().interrupted;
}

}  // namespace mambascope::cli
