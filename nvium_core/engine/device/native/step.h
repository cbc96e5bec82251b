// Runs a Step in one call: computes its rows, emits the fronts' tokens, and scores rows.
#pragma once

#include "decide.h"

namespace nvium {

template <typename T> class StepRun {
  using F = Front<Accumulator<T>>;

 public:
  StepRun(const Model<T>& model, Call& call) : model_(model), call_(call) {}

  void run() {
    Clock clock;
    double seconds = 0;
    do {
      pass();
      ++num_passes_;
      call_.first = 0;
      seconds += clock.lap();
    } while (seconds < call_.seconds && advance_all());
  }

 private:
  // Run the blocks once. Each run emits at most one token, or verifies its drafts.
  void pass() {
    std::vector<Run*> open;
    std::vector<F> fronts;
    std::vector<int64_t> first_scored;
    fronts.reserve(call_.num_runs);
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      Run& run = call_.runs[i];
      open.push_back(&run);
      first_scored.push_back(std::max(run.first_scored, run.filled[model_.last()]));
      fronts.emplace_back(run, call_.seats[run.seat], model_.vocab_size);
    }
    Decisions<T> decisions(model_, call_);
    int64_t passed = call_.first;
    for (int64_t block = call_.first; block < call_.stop; ++block) {
      const std::vector<Row> rows = rows_of(open, block);
      if (rows.empty()) continue;
      if (block > call_.first && !call_.is_one_pass && static_cast<int64_t>(rows.size()) > call_.max_rows) break;
      forward(block, rows);
      std::vector<F*> routed;
      for (F& front : fronts)
        if (!front.has_emitted && front.run->filled[block] < front.run->stop && is_routed(front)) routed.push_back(&front);
      for (Run* run : open) run->filled[block] = std::max(run->filled[block], run->stop);
      decisions.route_fronts(block, routed);
      passed = block;
      if (call_.is_one_pass) continue;
      decisions.emit(block, fronts);
      std::erase_if(open, [&](const Run* run) { return fronts[run - call_.runs].has_emitted; });
    }
    decisions.emit(passed, fronts);
    append_emitted();
    score_rows(first_scored);
  }

  std::vector<Row> rows_of(const std::vector<Run*>& open, int64_t block) const {
    std::vector<Row> rows;
    for (const Run* run : open)
      for (int64_t t = run->filled[block]; t < run->stop; ++t) rows.push_back({t, &call_.seats[run->seat]});
    return rows;
  }

  void forward(int64_t block, const std::vector<Row>& rows) {
    Clock clock;
    constexpr int64_t parts = std::is_same_v<T, BFloat16> ? 1 : kTileParts;
    const bool is_tiled = static_cast<int64_t>(rows.size()) >= call_.min_tiled_rows;
    BlockForward<T>(model_, rows, is_tiled ? parts : 0).run(block);
    BlockReport& report = call_.reports[block];
    ++report.num_steps;
    report.num_rows += rows.size();
    report.seconds += clock.lap();
  }

  // Return whether this block's exit runs for the front. In `original`, it runs if rows await verification. Otherwise it
  // runs unless the front has already exited in this pass.
  static bool is_routed(const F& front) {
    const int64_t rule = front.seat->draw.rule;
    const bool has_exited = (rule == kExits || rule == kThreshold) && !front.pending.empty();
    if (rule == kOriginal) return front.run->first_verified < front.run->stop;
    return front.run->reaches_front() && !has_exited;
  }

  void append_emitted() {
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      Run& run = call_.runs[i];
      if (run.num_emitted <= num_passes_) continue;  // this run has emitted nothing in this pass
      run.log_reached = 0;
      Seat& seat = call_.seats[run.seat];
      if (seat.draw.rule != kOriginal || run.first_verified + 1 == run.num_tokens)
        seat.append(run.emissions[run.num_emitted - 1].token, run.num_tokens);
    }
  }

  // Advance all runs to their next tokens. If a run may not emit another token, change no run and return false.
  bool advance_all() {
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      const Run& run = call_.runs[i];
      if (run.num_emitted >= run.limit || run.num_emitted < num_passes_) return false;
      const int64_t token = run.emissions[run.num_emitted - 1].token;
      if (token == kNoToken || call_.seats[run.seat].stops_at(token)) return false;
    }
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      Run& run = call_.runs[i];
      run.first_verified = run.num_tokens;
      run.stop = ++run.num_tokens;
    }
    return true;
  }

  // Score the rows that have passed the last block in this pass, and emitted rows that are scored at their exits.
  void score_rows(const std::vector<int64_t>& first_scored) {
    std::vector<ScoredRow> rows;
    for (int64_t i = 0; i < call_.num_runs; ++i) {
      Run& run = call_.runs[i];
      const Seat& seat = call_.seats[run.seat];
      const bool is_due = run.is_scored_at_exit && run.num_emitted;
      const int64_t end = is_due ? run.stop : run.filled[model_.last()];
      for (int64_t row = first_scored[i]; row < end; ++row, ++run.num_scored) {
        const int64_t target = std::max(int64_t{0}, seat.tokens[row + 1]);
        const int64_t exit = is_due && row == run.stop - 1 ? run.emissions[0].block : kNotEmitted;
        rows.push_back({seat.slot(row, model_.page_size), target, exit, seat.draw});
      }
    }
    if (!rows.empty()) score(model_, rows, call_.num_top, call_.scores);
  }

  const Model<T>& model_;
  Call& call_;
  int64_t num_passes_ = 0;
};

}  // namespace nvium
