// net/http and go-sqlite3, as their documentation shows them. Each commit is synced, as in the service.
// https://pkg.go.dev/net/http and https://github.com/mattn/go-sqlite3#faq
// peer_go PORT is one process that uses every core.
package main

import (
	"crypto/subtle"
	"database/sql"
	"encoding/json"
	"log"
	"net/http"
	"os"
	"strings"
	"time"

	_ "github.com/mattn/go-sqlite3"
)

type plant struct {
	Name *string `json:"name"`
	Tag  *string `json:"tag,omitempty"`
}

type newPlant struct {
	ID *int64 `json:"id"`
	plant
}

type problem struct {
	Error   int    `json:"error"`
	Message string `json:"message"`
}

func hasNUL(text *string) bool { return text != nil && strings.Contains(*text, "\x00") }

func main() {
	path := strings.TrimPrefix(os.Getenv("DATABASE_URL"), "sqlite:///")
	database, err := sql.Open("sqlite3", "file:"+path+"?_journal_mode=WAL&_synchronous=FULL&_busy_timeout=10000")
	if err != nil {
		log.Fatal(err)
	}
	database.SetMaxOpenConns(1) // the FAQ's advice against "database is locked"
	insert, err := database.Prepare("INSERT INTO plants VALUES (?, ?, ?) ON CONFLICT DO NOTHING")
	if err != nil {
		log.Fatal(err)
	}
	expected := []byte("Bearer " + os.Getenv("PLANTS_TOKENS"))

	create := func(r *http.Request) (int, any) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), expected) != 1 {
			return 401, problem{401, "the token is missing or wrong"}
		}
		var body newPlant
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			return 400, problem{400, err.Error()}
		}
		if body.ID == nil || body.Name == nil || hasNUL(body.Name) || hasNUL(body.Tag) {
			return 400, problem{400, "id and name are required, and no text may contain NUL"}
		}
		result, err := insert.Exec(*body.ID, *body.Name, body.Tag)
		if err != nil {
			return 500, problem{500, err.Error()}
		}
		if changes, _ := result.RowsAffected(); changes == 0 {
			return 409, problem{409, "there is a plant with this id"}
		}
		return 200, body.plant
	}

	http.HandleFunc("/plants", func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		status, response := create(r)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		json.NewEncoder(w).Encode(response)
		log.Printf("%s %s %s %d %s", r.RemoteAddr, r.Method, r.URL.Path, status, time.Since(start))
	})
	log.Fatal(http.ListenAndServe("127.0.0.1:"+os.Args[1], nil))
}
