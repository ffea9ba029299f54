#include "server/serving/result_stream.h"

#include <utility>

namespace mambascope::serving {

ResultStream::ResultStream(int64_t capacity_bytes, std::function<void()> on_room)
    : capacity_bytes_(capacity_bytes), on_room_(std::move(on_room)) {}

void ResultStream::Send(v1::PredictEvent event) {
  const int64_t bytes = static_cast<int64_t>(event.ByteSizeLong());
  std::function<void()> readable;
  {
    std::lock_guard lock(mu_);
    if (closed_ || cancelled_) return;
    events_.emplace_back(std::move(event), bytes);
    waiting_bytes_ += bytes;
    readable = on_readable_;
  }
  if (readable) readable();
}

bool ResultStream::HasRoom() const {
  std::lock_guard lock(mu_);
  return waiting_bytes_ < capacity_bytes_;
}

void ResultStream::Close(absl::Status status) {
  std::function<void()> readable;
  {
    std::lock_guard lock(mu_);
    if (closed_) return;
    closed_ = true;
    status_ = std::move(status);
    readable = on_readable_;
  }
  if (readable) readable();
}

bool ResultStream::cancelled() const {
  std::lock_guard lock(mu_);
  return cancelled_;
}

void ResultStream::SetOnReadable(std::function<void()> on_readable) {
  {
    std::lock_guard lock(mu_);
    on_readable_ = on_readable;
    if (events_.empty() && !closed_) return;
  }
  on_readable();
}

ResultStream::Next ResultStream::TryPop(v1::PredictEvent* event) {
  bool made_room = false;
  {
    std::lock_guard lock(mu_);
    if (events_.empty()) return closed_ ? Next::kClosed : Next::kWait;
    *event = std::move(events_.front().first);
    const bool was_full = waiting_bytes_ >= capacity_bytes_;
    waiting_bytes_ -= events_.front().second;
    made_room = was_full && waiting_bytes_ < capacity_bytes_;
    events_.pop_front();
  }
  if (made_room && on_room_) on_room_();
  return Next::kEvent;
}

absl::Status ResultStream::final_status() const {
  std::lock_guard lock(mu_);
  return status_;
}

void ResultStream::Cancel() {
  {
    std::lock_guard lock(mu_);
    if (cancelled_) return;
    cancelled_ = true;
    events_.clear();
    waiting_bytes_ = 0;
  }
  if (on_room_) on_room_();
}

}  // namespace mambascope::serving
