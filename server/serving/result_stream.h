#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

#include "absl/status/status.h"
#include "mambascope/v1/prediction.pb.h"
#include "server/explain/event_sink.h"

namespace mambascope::serving {

// The events of one call on their way from the executor (one producer) to its reader (one
// consumer). Bounded by consent: the producer starts no explanation slice while HasRoom() is false,
// so a slow reader slows its own explanation only, and the bound is exceeded by one slice at the
// most. Token events are small and always accepted. Threads: every call from any thread. Callbacks
// run without the lock held, on the thread that caused them, and must not block.
class ResultStream : public explain::EventSink {
 public:
  enum class Next { kEvent, kWait, kClosed };

  // `on_room`: the reader made room or left; may be empty.
  explicit ResultStream(int64_t capacity_bytes, std::function<void()> on_room = {});

  // ---- producer ----
  void Send(v1::PredictEvent event) override;  // dropped once the stream is closed or cancelled
  bool HasRoom() const;
  // No more events; the reader gets `status` after the last one. Only the first Close counts.
  void Close(absl::Status status);
  bool cancelled() const;

  // ---- consumer ----
  // `on_readable`: an event or the end has come; may run at once, on this thread.
  void SetOnReadable(std::function<void()> on_readable);
  Next TryPop(v1::PredictEvent* event);
  absl::Status final_status() const;  // after kClosed
  // The reader left: what waits is dropped, and the producer learns it by cancelled().
  void Cancel();

 private:
  const int64_t capacity_bytes_;
  const std::function<void()> on_room_;

  mutable std::mutex mu_;
  std::function<void()> on_readable_;
  std::deque<std::pair<v1::PredictEvent, int64_t>> events_;  // with their sizes
  int64_t waiting_bytes_ = 0;
  bool closed_ = false;
  bool cancelled_ = false;
  absl::Status status_;
};

}  // namespace mambascope::serving
